"""Segment procedural volumes by a 3-D U-Net on 1, 2 and 4 ranks: ``python examples/scaffold.py``.

Network and figure of merit are those of ScaFFold, a benchmark of national laboratories for training that is
split in space: convolutions of 3 x 3 x 3, group norm, ReLU, max pools and transposed convolutions of 2; the
seconds until the Dice score of volumes that the network has not seen is 0.95. The volumes are made here:
fractals, each class by affine maps of its own, in noise. The program starts one job for each number of ranks.
Losses and scores have to be those of one rank. The program computes in double precision, since training
amplifies rounding: sums over ranks have another order. ``--single`` computes in single precision, and
compares the losses of the first epoch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

IMAGES, MASKS, LOG = "images.npy", "masks.npy", "log.json"
# Volumes that the network does not see while it learns.
HELD_BACK = 2
SEED, NOISE = 5, 0.1
# Maps of a fractal, and by how much they contract at least.
MAPS, SCALE = 4, 0.8
GROUPS = 4
# Relative, of losses and scores.
LIMIT = 1e-4


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("scaffold-output"), help="folder, which is made")
    parser.add_argument("--size", type=int, default=16, help="voxels along each side of a volume (16)")
    parser.add_argument("--volumes", type=int, default=16, help="volumes to learn from (16)")
    parser.add_argument("--classes", type=int, default=3, help="kinds of fractals (3)")
    parser.add_argument("--channels", type=int, default=8, help="channels of the first level (8)")
    parser.add_argument("--levels", type=int, default=2, help="how often the U-Net halves its input (2)")
    parser.add_argument("--epochs", type=int, default=60, help="most epochs (60)")
    parser.add_argument("--goal", type=float, default=0.95, help="Dice score that ends the training (0.95)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="of each job (1 2 4)")
    parser.add_argument("--grid", default="D", help="dimensions that are cut, in the order of factors (D)")
    parser.add_argument("--mpiexec", default="mpiexec", help="launcher and its options (mpiexec)")
    parser.add_argument("--single", action="store_true", help="single precision")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.channels % GROUPS:
        parser.error(f"--channels {chosen.channels} is no multiple of {GROUPS}, the groups of the norms")
    if chosen.size % 2**chosen.levels:
        parser.error(f"--size {chosen.size} cannot be halved {chosen.levels} times")
    return chosen


# ------------------------------------------------------------------------------------------------ the volumes


def fractal(kind: int, points: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Points in the unit cube where the affine maps of a class lead, each time by one at random."""
    own = np.random.default_rng((SEED, kind))
    turns = np.linalg.qr(own.normal(size=(MAPS, 3, 3)))[0]
    maps = turns * own.uniform(SCALE / 2, SCALE, (MAPS, 1, 3))
    steps, x = own.uniform(-1, 1, (MAPS, 3)), np.zeros((points, 3))
    for _ in range(16):
        which = rng.integers(MAPS, size=points)
        x = np.einsum("pij,pj->pi", maps[which], x) + steps[which]
    x -= x.min(0)
    x /= x.max()
    return x


def volume(number: int, size: int, classes: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """A volume with a fractal of each class, turned at random, and its mask: 0, or the class of a voxel."""
    rng = np.random.default_rng((SEED, 0, number))
    mask = np.zeros((size,) * 3, np.int64)
    for kind in 1 + rng.permutation(classes):
        x = fractal(kind, size**3 // 4, rng)[:, rng.permutation(3)]
        mask[tuple((x * (size - 1)).astype(int).T)] = kind
    image = mask / classes + rng.normal(0, NOISE / classes, mask.shape)
    return image[None].astype(np.float32), mask


def write_volumes(chosen: argparse.Namespace) -> None:
    made = [volume(number, chosen.size, chosen.classes) for number in range(chosen.volumes + HELD_BACK)]
    for name, arrays in zip((IMAGES, MASKS), zip(*made, strict=True), strict=True):
        np.save(chosen.output / name, np.stack(arrays))


# ------------------------------------------------------------------------------------------ the job of a rank


def network(chosen: argparse.Namespace) -> nn.Module:
    """A 3-D U-Net with group norm, with the same initial weights on all ranks."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812

    def block(*channels: int) -> nn.Sequential:
        triples = [
            (nn.Conv3d(*pair, 3, padding=1), nn.GroupNorm(GROUPS, pair[1]), nn.ReLU())
            for pair in pairwise(channels)
        ]
        return nn.Sequential(*(layer for triple in triples for layer in triple))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [chosen.channels << level for level in range(chosen.levels + 1)]
            self.down = nn.ModuleList(block(a, b, b) for a, b in pairwise([1, *widths]))
            self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(widths))
            self.join = nn.ModuleList(block(2 * a, a, a) for a in widths[:-1])
            self.last = nn.Conv3d(widths[0], chosen.classes + 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            skips: list[Tensor] = []
            for level, down in enumerate(self.down):
                x = down(F.max_pool3d(x, 2) if level else x)
                skips.append(x)
            for skip, up, join in zip(skips[-2::-1], reversed(self.up), reversed(self.join), strict=True):
                x = join(torch.cat([skip, up(x)], 1))
            return self.last(x)

    torch.manual_seed(SEED)
    return UNet()


def dice(scores: Tensor, masks: Tensor) -> float:
    """Mean Dice score of the classes: of split tensors the number of the whole, alike on all ranks."""
    found, classes = scores.argmax(1), range(1, scores.shape[1])
    both = [((found == k) & (masks == k)).sum().item() for k in classes]
    each = [((found == k).sum() + (masks == k).sum()).item() for k in classes]
    return sum(2 * a / max(b, 1) for a, b in zip(both, each, strict=True)) / len(classes)


def train(chosen: argparse.Namespace) -> None:
    """Train until the goal; every rank reads its blocks of the volumes, and nothing else."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    from distdl_rma import Machine, ShardDataset, ShardLoader, distribute

    with Machine.on() as machine:
        grid = dict(zip(chosen.grid, factors(machine.size, len(chosen.grid)), strict=True))
        files = [np.load(chosen.output / name, mmap_mode="r") for name in (IMAGES, MASKS)]
        lessons, exam = (
            ShardLoader(
                ShardDataset(*(file[part] for file in files), grid=grid, seed=SEED), 1, shuffle=shuffle
            )
            for part, shuffle in ((slice(HELD_BACK, None), True), (slice(HELD_BACK), False))
        )
        dtype = torch.float32 if chosen.single else torch.float64
        model = distribute(network(chosen).to(dtype), grid)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
        log: dict[str, Any] = {"losses": [], "scores": []}
        begun = time.perf_counter()
        for _ in range(chosen.epochs):
            model.train()
            for image, mask in lessons:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(image.to(dtype)), mask)
                loss.backward()
                optimizer.step()
                log["losses"].append(loss.item())
            model.eval()
            with torch.no_grad():
                scores = [dice(model(image.to(dtype)), mask) for image, mask in exam]
            log["scores"].append(sum(scores) / len(scores))
            if log["scores"][-1] >= chosen.goal:
                break
        log["seconds"] = time.perf_counter() - begun
        log["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if machine.rank == 0:
            (chosen.output / chosen.job / LOG).write_text(json.dumps(log))


def factors(ranks: int, dims: int) -> list[int]:
    """Factors of a number of ranks for each dimension that is cut, the first ones larger."""
    found = [1] * dims
    for prime in (2, 3, 5, 7):
        while ranks % prime == 0:
            found[found.index(min(found))] *= prime
            ranks //= prime
    found[0] *= ranks
    return sorted(found, reverse=True)


# ------------------------------------------------------------------------------------------- jobs, the table


def run(chosen: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Start the job on so many ranks by mpiexec; what it logged."""
    job = f"{ranks}-ranks"
    (chosen.output / job).mkdir(exist_ok=True)
    keys = "output", "size", "volumes", "classes", "channels", "levels", "epochs", "goal", "grid"
    given = [f"--{key}={getattr(chosen, key)}" for key in keys]
    command = [*shlex.split(chosen.mpiexec), "-n", str(ranks), sys.executable, "-W", "ignore:distribute"]
    command += ["-m", "mpi4py", __file__, *given, f"--job={job}", *["--single"] * chosen.single]
    done = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"scaffold.py: the job on {ranks} ranks ended with {done.returncode}")
    log: dict[str, Any] = json.loads((chosen.output / job / LOG).read_text())
    return log


def difference(log: dict[str, Any], first: dict[str, Any], key: str, most: int | None) -> float:
    """The largest relative difference of the first numbers of two jobs; infinite if one has fewer."""
    mine, expected = (np.array(each[key][:most]) for each in (log, first))
    if mine.shape != expected.shape:
        return float("inf")
    return float((abs(mine - expected) / abs(expected).clip(1e-3)).max())


def main() -> int:
    """Exit status: 0 if losses and scores are the same on all numbers of ranks, else 1."""
    chosen = options()
    if chosen.job:
        train(chosen)
        return 0
    chosen.output.mkdir(parents=True, exist_ok=True)
    write_volumes(chosen)
    print("ranks  seconds  MiB of rank 0  epochs  Dice    largest difference of losses, scores", flush=True)
    first, equal = None, True
    for ranks in chosen.ranks:
        log = run(chosen, ranks)
        first = first or log
        loss = difference(log, first, "losses", chosen.volumes if chosen.single else None)
        score = difference(log, first, "scores", 1 if chosen.single else None)
        equal = equal and loss < LIMIT and (chosen.single or score < LIMIT)
        row = f"{ranks:5}  {log['seconds']:7.1f}  {log['mib']:13.0f}  {len(log['scores']):6}"
        print(f"{row}  {log['scores'][-1]:.4f}  {loss:.1e}, {score:.1e}", flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

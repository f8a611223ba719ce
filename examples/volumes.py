"""Train on a volume that is larger than memory, by a job that is killed: ``python examples/volumes.py``.

The program writes an HDF5 volume of random blobs, and starts three jobs by mpiexec. The first one trains a
3-D network on 3 ranks that learns to remove noise from random crops of the volume, without an interruption.
The second one does the same, until one of its ranks is killed by SIGKILL. The third one goes on from the last
checkpoint of the second, on 2 ranks. Crops, their order, flips, noise and dropout do not depend on the number
of ranks, so the losses of both ways are the same. ``--memory`` limits the address space of each rank, as
``ulimit -v`` does: the volume does not fit into it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOLUME, PICTURE = "volume.h5::scan", "volumes.png"
NOISE, SEED = 0.2, 11
# Both ways may differ by rounding: sums over ranks have another order.
LIMIT = 1e-4


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("volumes-output"), help="folder, which is made")
    parser.add_argument("--size", type=int, default=960, help="elements along each side of the volume (960)")
    parser.add_argument("--crop", type=int, default=48, help="elements along each side of a crop (48)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (40)")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints (5)")
    parser.add_argument("--kill", type=int, default=23, help="step after which a rank is killed (23)")
    parser.add_argument("--memory", type=float, default=1.5, help="GiB of address space of a rank (1.5)")
    parser.add_argument("--mpiexec", default="mpiexec", help="launcher and its options (mpiexec)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.size < chosen.crop:
        parser.error(f"a crop of {chosen.crop} does not fit into a volume of {chosen.size}")
    if not 0 < chosen.every <= chosen.kill < chosen.steps:
        parser.error("at least one checkpoint before the kill, and steps after it, are needed")
    return chosen


# ------------------------------------------------------------------------------------------ the job of a rank


def network() -> Any:
    """A small 3-D network, with the same initial weights on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.InstanceNorm3d(8, affine=True),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 1, 3, padding=1),
    )


def train(chosen: argparse.Namespace) -> None:
    """Train from the newest checkpoint on; every rank reads its blocks of each crop, and nothing else."""
    if chosen.memory:
        most = int(chosen.memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    import torch
    from torch.nn import functional as F  # noqa: N812

    from distdl_rma import Checkpoints, Machine, ShardDataset, ShardLoader, distribute

    folder = chosen.output / chosen.job
    with Machine.on() as machine:
        first = machine.rank == machine.ranks[0]
        grid = {"D": machine.size}
        data = ShardDataset(
            [chosen.output / VOLUME],
            grid=grid,
            crop=(chosen.crop,) * 3,
            crops=chosen.steps,
            channels=False,
            seed=SEED,
        )
        loader = ShardLoader(data, batch=1, shuffle=True, prefetch=2)
        model = distribute(network(), grid)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        with Checkpoints(folder, keep=2, every=chosen.every, asynchronous=True) as checkpoints:
            step = checkpoints.restore(state)
            (folder / f"rank-{machine.rank}.pid").write_text(str(os.getpid()))
            for clean in loader:
                # Alike on all ranks, whose generators have one seed, and restored by the checkpoint.
                clean = clean.flip([d for d in (2, 3, 4) if torch.rand(()) < 0.5])
                optimizer.zero_grad()
                loss = F.mse_loss(model(clean + NOISE * torch.randn_like(clean)), clean)
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                log(folder, first, step, loss.item(), machine.size)
                if checkpoints.due(step):
                    checkpoints.save(state, step)


def log(folder: Path, first: bool, step: int, loss: float, ranks: int) -> None:
    """Append a line to the log of the job, on one rank."""
    if first:
        with (folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps([step, loss, ranks]) + "\n")


# ------------------------------------------------------------------------------ the volume, jobs, the picture


def make_volume(path: Path, size: int) -> None:
    """Write a volume of smooth random blobs, slab by slab: contiguous, so that ranks read by byte offset."""
    rng = np.random.default_rng(SEED)
    a, b, c = rng.normal(size=(3, 6)) * 0.12
    phases, axis = rng.uniform(0, 6, 6), np.arange(size)[:, None]
    columns = np.hstack([np.cos(c * axis), np.sin(c * axis)]).T
    with h5py.File(path, "w") as file:
        scan = file.create_dataset("scan", (size,) * 3, "f4")
        for z in range(size):
            # Sums of cos(a z + b y + c x + phase), as a product of matrices.
            along = a * z + b * axis + phases
            scan[z] = np.hstack([np.cos(along), -np.sin(along)]) @ columns > 1


def start(chosen: argparse.Namespace, job: str, ranks: int) -> subprocess.Popen[bytes]:
    """Start a training job by mpiexec."""
    (chosen.output / job).mkdir(exist_ok=True)
    given = [
        f"--{key}={getattr(chosen, key)}" for key in ("output", "size", "crop", "steps", "every", "kill")
    ]
    command = [*shlex.split(chosen.mpiexec), "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__]
    # The segment of each rank of a node counts as address space of all of them.
    told = os.environ | {"OMP_NUM_THREADS": "1", "DISTDL_RMA_SEGMENT_SIZE": "64MiB"}
    return subprocess.Popen([*command, *given, f"--memory={chosen.memory}", f"--job={job}"], env=told)


def finished(job: subprocess.Popen[bytes], name: str) -> None:
    if status := job.wait():
        raise SystemExit(f"volumes.py: the job {name!r} ended with {status}")


def losses(folder: Path) -> list[tuple[int, float, int]]:
    """Step, loss and number of ranks of each line of a job's log that is complete."""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def kill(chosen: argparse.Namespace, job: subprocess.Popen[bytes], folder: Path, ranks: int) -> int:
    """Kill the last rank by SIGKILL after the step and a complete checkpoint; return the last step logged."""
    while not (any(folder.glob("step-*/manifest.json")) and losses(folder)[-1][0] >= chosen.kill):
        if job.poll() is not None:
            raise SystemExit(f"volumes.py: the job that was to be killed ended with {job.returncode}")
        time.sleep(0.01)
    os.kill(int((folder / f"rank-{ranks - 1}.pid").read_text()), signal.SIGKILL)
    if job.wait() == 0:
        raise SystemExit("volumes.py: the job was complete before it was killed")
    return losses(folder)[-1][0]


def draw(whole: Sequence[Any], parts: Sequence[Any], path: Path) -> None:
    """Both loss curves on top of each other."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        *list(zip(*whole, strict=True))[:2], color="0.75", linewidth=6, label="3 ranks, not interrupted"
    )
    for ranks, label in ((3, "3 ranks, killed by SIGKILL"), (2, "2 ranks, from the last checkpoint")):
        some = [(step, loss) for step, loss, count in parts if count == ranks]
        axes.plot(*zip(*some, strict=True), ".-", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path)


def pairs(whole: Sequence[Any], parts: Sequence[Any]) -> Iterator[tuple[int, float, float]]:
    """Step and the losses of both ways, for each step of each job."""
    expected = {step: loss for step, loss, _ in whole}
    return ((step, loss, expected[step]) for step, loss, _ in parts)


def main() -> int:
    """Exit status: 0 if the losses of both ways are the same, else 1."""
    chosen = options()
    if chosen.job:
        train(chosen)
        return 0
    shutil.rmtree(chosen.output, ignore_errors=True)
    chosen.output.mkdir(parents=True)
    file = chosen.output / "volume.h5"
    make_volume(file, chosen.size)
    limit = f", each rank may use {chosen.memory:g} GiB" if chosen.memory else ""
    print(f"volume of {file.stat().st_size / 2**30:.2f} GiB{limit}", flush=True)
    finished(start(chosen, "whole", 3), "whole")
    last = kill(chosen, start(chosen, "killed", 3), chosen.output / "killed", 3)
    print(f"killed a rank of 3 by SIGKILL after step {last}; going on with 2 ranks", flush=True)
    finished(start(chosen, "killed", 2), "killed")
    whole, parts = losses(chosen.output / "whole"), losses(chosen.output / "killed")
    worst = max(abs(loss - other) / other for _, loss, other in pairs(whole, parts))
    steps = sorted({step for step, *_ in parts}) == [*range(1, chosen.steps + 1)]
    draw(whole, parts, chosen.output / PICTURE)
    begun = min(step for step, _, ranks in parts if ranks == 2)
    print(f"the 2 ranks began with step {begun}; losses from {whole[0][1]:.3f} to {whole[-1][1]:.3f}")
    print(f"largest relative difference of a loss: {worst:.1e} (limit {LIMIT:g}); {chosen.output / PICTURE}")
    return 0 if steps and worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

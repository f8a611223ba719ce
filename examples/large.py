"""Predict for an image that is larger than memory: ``python examples/large.py``.

The program writes an image of blobs whose brightness varies from place to place, and limits its address
space, as ``ulimit -v`` does, to less than a network with instance norm needs for all of it at once. Then it
computes the result of the network twice: by ``distdl_rma.predict``, and by tiles that overlap, as others do.
Each tile is normalised by itself, so tiles show seams; ``predict`` has none. At last ``--check`` computes
the result of the whole, without the limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import nn

from distdl_rma import DistdlError, open_array, plan_prediction, predict

BORDER = 0.2  # of a tile, beyond what is kept of it
GIB, MIB, STACK = 1 << 30, 1 << 20, 8 << 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("large-output"), help="folder, which is made")
    parser.add_argument(
        "--side", type=int, default=2048, help="pixels along each side, an even number (2048)"
    )
    parser.add_argument("--tile", type=int, default=512, help="pixels along each side of a tile (512)")
    parser.add_argument("--memory", type=int, default=400, help="MiB for the prediction (400)")
    parser.add_argument("--check", action="store_true", help="compare with the result of the whole")
    chosen = parser.parse_args()
    if chosen.tile < 32 or chosen.tile > chosen.side or chosen.side % 2:
        parser.error(
            "a side has an even number of pixels, a tile 32 at least, and at most those of the image"
        )
    return chosen


class Sharpener(nn.Module):
    """Edges of an image, by two levels with instance norm and a skip; not trained, but alike in each run."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.fine, self.coarse = _block(1, width), _block(width, 2 * width)
        self.down, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(_block(2 * width, width), nn.Conv2d(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(x)
        y: torch.Tensor = self.last(torch.cat([fine, self.up(self.coarse(self.down(fine)))], 1))
        return y


def _block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.InstanceNorm2d(outside), nn.LeakyReLU(0.1)
    )


def write_image(path: Path, side: int) -> None:
    """Blobs on a background that grows brighter to the right, row by row."""
    numbers = np.random.default_rng(3)
    waves = numbers.uniform(-0.15, 0.15, (24, 2)), numbers.uniform(0, 2 * np.pi, 24)
    image = np.lib.format.open_memmap(path, "w+", np.float32, (side, side))
    columns = np.arange(side, dtype=np.float32)
    for row in range(side):
        phase = waves[0][:, :1] * row + waves[0][:, 1:] * columns + waves[1][:, None]
        image[row] = np.sin(phase).sum(0) * (0.2 + columns / side) + 4 * columns / side
    image.flush()


@torch.no_grad()
def by_tiles(model: nn.Module, source: Path, side: int, tile: int) -> torch.Tensor:
    """The result by tiles that overlap, of which the middles are kept."""
    image, y = open_array(source), torch.zeros(side, side)
    # Tiles begin and end at even pixels, as a U-Net needs them.
    border = int(BORDER * tile) // 2 * 2
    step = tile // 2 * 2 - 2 * border
    for top in range(0, side, step):
        for left in range(0, side, step):
            box = tuple(slice(max(0, at - border), min(side, at + step + border)) for at in (top, left))
            part = torch.as_tensor(np.asarray(image[box]))
            found = model(part[None, None])[0, 0]
            kept = found[top - box[0].start :, left - box[1].start :][:step, :step]
            y[top : top + kept.shape[0], left : left + kept.shape[1]] = kept
    return y


def draw(path: Path, results: dict[str, torch.Tensor], errors: dict[str, torch.Tensor]) -> None:
    """Results side by side, and below them what differs from the whole."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(5 * len(results), 10), squeeze=False)
    bound = max(float(each.max()) for each in errors.values())
    for column, name in enumerate(results):
        axes[0][column].imshow(results[name][::4, ::4], cmap="gray")
        axes[0][column].set_title(name)
        axes[1][column].imshow(errors[name][::4, ::4], cmap="magma", vmin=0, vmax=bound)
        axes[1][column].set_title(f"differs by {float(errors[name].max()):.2g} at most")
    for each in axes.flat:
        each.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def address_space() -> int:
    """Bytes that this process has addresses for."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> int:
    chosen = options()
    chosen.output.mkdir(exist_ok=True)
    source, target = chosen.output / "image.npy", chosen.output / "edges.npy"
    target.unlink(missing_ok=True)
    write_image(source, chosen.side)
    model, memory = Sharpener().eval(), f"{chosen.memory}MiB"
    try:
        plan = plan_prediction(model, source, memory=memory, scratch=chosen.output)
    except DistdlError as refused:
        print(refused)
        return 1
    print(plan)
    # What the process has addresses for is more than its memory: libraries, segments and stacks of the slabs.
    limit = address_space() + chosen.memory * MIB + GIB + plan.slabs * STACK
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    begin = time.perf_counter()
    predict(model, source, target, memory=memory, scratch=chosen.output)
    print(f"predict: {time.perf_counter() - begin:.0f} s")
    begin = time.perf_counter()
    results = {"tiles": by_tiles(model, source, chosen.side, chosen.tile)}
    print(f"tiles: {time.perf_counter() - begin:.0f} s")
    results["predict"] = torch.from_numpy(np.load(target))[0]
    resource.setrlimit(resource.RLIMIT_AS, before)
    whole = results["predict"]
    if chosen.check:
        with torch.no_grad():
            whole = model(torch.from_numpy(np.load(source))[None, None])[0, 0]
    errors = {name: (y - whole).abs() for name, y in results.items()}
    draw(chosen.output / "large.png", results, errors)
    for name, error in errors.items():
        against = "the whole" if chosen.check else "predict"
        print(
            f"{name} differs from {against} by {float(error.max()):.2g} at most, of {float(whole.std()):.2g}"
        )
    if chosen.check and float(errors["predict"].max()) > 1e-3:
        print("predict should be equal but for rounding")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

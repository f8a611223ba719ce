"""Prediction slab by slab against the whole in memory, and against a sliding window; on the first rank alone.

``PREDICT_BENCH_SIDE=512`` makes images of 2,048 squared, and volumes, smaller. A job of two ranks measures
what the second one saves.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from benchmarks.measure import COMM, Row, compare, timed
from benchmarks.memory import peak_kib
from benchmarks.unet import Layers, UNet
from distdl_rma import Machine, Source, plan_prediction, predict

SIDE = int(os.environ.get("PREDICT_BENCH_SIDE", "2048"))
SLABS, CLASSES = 8, 100
# Of the prediction of a volume: less than a fifth of what a sliding window needs for it.
MEMORY = "640MiB"
# Of that of a volume of ``SIDE // 16 * 3`` cubed.
CUBE_MEMORY = "1536MiB"
# Of a prediction of small images.
LEAST_NBYTES = 1 << 27
# A call takes seconds.
REPETITIONS = 11


def rows(_machine: Machine) -> Iterator[Row]:
    """2-D without statistics, 2-D with instance norm on disk, 3-D with many classes, 3-D beside tiles."""
    if COMM.size > 1:
        yield from _on_ranks()
        return
    folder = Path(tempfile.mkdtemp(prefix="predict-bench-", dir=os.environ.get("TMPDIR")))
    try:
        yield _in_slabs(folder, "batch norm", nn.BatchNorm2d, 1.1)
        yield _in_slabs(folder, "instance norm, on disk", nn.InstanceNorm2d, 1.5)
        yield from _many_classes(folder)
        yield from _beside_tiles(folder)
    finally:
        shutil.rmtree(folder)


def _in_slabs(folder: Path, what: str, norm: Callable[..., nn.Module], target: float) -> Row:
    model = UNet(16, Layers(norm=norm)).eval()
    x = torch.randn(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    whole = plan_prediction(model, x, memory="1TiB").whole_nbytes
    # A part of what waits for a norm is on disk.
    how = {"grid": {"H": SLABS}, "memory": max(int(0.6 * whole), LEAST_NBYTES), "scratch": folder}

    @torch.no_grad()
    def baseline() -> None:
        model(x)

    return compare(
        f"2-D U-Net, {SIDE} squared, {what}, in {SLABS} slabs",
        lambda: predict(model, x, **how),  # type: ignore[arg-type]
        baseline,
        against="the whole in memory",
        target=target,
        repetitions=REPETITIONS,
    )


def _many_classes(folder: Path) -> Iterator[Row]:
    # Time, memory and difference from the whole, beside MONAI's sliding window with its defaults.
    inferers: Any = import_module("monai.inferers")
    nets: Any = import_module("monai.networks.nets")
    torch.manual_seed(1)
    model = nets.BasicUNet(3, 1, CLASSES, features=(16, 16, 32, 64, 128, 16)).eval()
    side = SIDE // 16
    x = torch.randn(1, 1, side, side, 3 * side, generator=torch.Generator().manual_seed(2))
    np.save(folder / "volume.npy", x.numpy())
    window, found = inferers.SlidingWindowInferer(roi_size=(96, 96, 96)), dict[str, torch.Tensor]()

    def ours() -> None:
        (folder / "classes.npy").unlink(missing_ok=True)
        predict(
            model, folder / "volume.npy", folder / "classes.npy", memory=MEMORY, post=_classes, scratch=folder
        )

    @torch.no_grad()
    def baseline() -> None:
        found["tiles"] = _classes(window(x, model))

    against, shape = "MONAI's sliding window", "x".join(map(str, x.shape[2:]))
    what = f"3-D BasicUNet, {shape}, {CLASSES} classes"
    yield compare(what, ours, baseline, against=against, target=1.0, repetitions=3)
    mine, theirs = (peak_kib(each, steps=1) / 1024 for each in (ours, baseline))
    yield Row(f"peak memory, {what}", against, mine, 0, theirs, 0, 0.2, "MiB")
    with torch.no_grad():
        whole = _classes(model(x))
    wrong = [
        100 * float((torch.as_tensor(y) != whole).double().mean())
        for y in (np.load(folder / "classes.npy"), found["tiles"])
    ]
    yield Row(f"voxels of another class than in the whole, {what}", against, wrong[0], 0, wrong[1], 0, 0, "%")


def _cube(
    side: int, norm: Callable[..., nn.Module] = nn.InstanceNorm3d
) -> tuple[nn.Module, Source, list[int]]:
    # A U-Net of 8 channels, a volume in chunks of 64 that are fetched whole, and the bytes of each fetch.
    model = UNet(8, Layers(nn.Conv3d, norm, nn.MaxPool3d, nn.ConvTranspose3d)).eval()
    x = np.random.default_rng(0).standard_normal((side,) * 3, np.float32)
    chunk, fetched = 64, list[int]()

    def read(box: tuple[slice, ...]) -> Any:
        ends = [(each.start // chunk * chunk, min(-(-each.stop // chunk) * chunk, side)) for each in box]
        fetched.append(prod(b - a for a, b in ends) * x.itemsize)
        return x[box]

    return model, Source(x.shape, x.dtype, read, (chunk,) * 3), fetched


def _beside_tiles(folder: Path) -> Iterator[Row]:
    # One call of each: a call takes minutes.
    side = SIDE // 16 * 3
    model, source, fetched = _cube(side)
    window: Any = import_module("monai.inferers").SlidingWindowInferer(roi_size=(96, 96, 96), overlap=0.25)
    found, out = dict[str, torch.Tensor](), folder / "cube.npy"
    seconds = dict[str, float]()

    def ours() -> None:
        seconds["ours"] = timed(
            lambda: predict(model, source, out, memory=CUBE_MEMORY, post=_classes, scratch=folder), 1
        )

    @torch.no_grad()
    def tiles() -> None:
        whole = torch.from_numpy(source[(slice(0, side),) * 3])[None, None]
        seconds["tiles"] = timed(lambda: found.update(tiles=_classes(window(whole, model))), 1)

    mine, theirs = (peak_kib(each, steps=1) / 1024 for each in (ours, tiles))
    plan = plan_prediction(model, source, memory=CUBE_MEMORY, post=_classes, scratch=folder)
    what, against = f"3-D U-Net, width 8, instance norm, {side} cubed", "MONAI's sliding window"
    times = (1e6 * seconds[name] for name in ("ours", "tiles"))
    yield Row(what, against, next(times), 0, next(times), 0, 1.0)
    yield Row(f"peak memory, {what}", against, mine, 0, theirs, 0, 0.2, "MiB")
    yield Row(f"peak memory, {what}", "the memory that is allowed", mine, 0, 1536, 0, 1.0, "MiB")
    reads = sum(fetched[:-1]) / np.prod(source.shape) / 4
    yield Row(f"bytes of the source, {what}", "by tiles", reads, 0, plan.tile_reads, 0, None, "x")


def _on_ranks() -> Iterator[Row]:
    # Both with one thread for a rank.
    side = SIDE // 16
    for norm in (nn.BatchNorm3d, nn.InstanceNorm3d):
        model, source, _ = _cube(side, norm)
        how = {"grid": {"D": SLABS}, "memory": CUBE_MEMORY, "post": _classes}

        def alone(how: Any = how, model: Any = model, source: Any = source) -> None:
            if COMM.rank == 0:
                predict(model, source, comm=MPI.COMM_SELF, **how)

        def together(how: Any = how, model: Any = model, source: Any = source) -> None:
            predict(model, source, **how)

        what = f"3-D U-Net, width 8, {norm.__name__}, {side} cubed, on {COMM.size} ranks"
        yield compare(what, together, alone, against="a rank alone", target=1 / 1.7, repetitions=3)


def _classes(y: torch.Tensor) -> torch.Tensor:
    return y.argmax(1).to(torch.uint8)

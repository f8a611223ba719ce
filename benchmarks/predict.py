"""Prediction slab by slab against the whole in memory, and against a sliding window; on the first rank alone.

``PREDICT_BENCH_SIDE=512`` makes images of 2,048 squared, and volumes, smaller.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import COMM, Row, compare
from benchmarks.memory import peak_kib
from benchmarks.unet import Layers, UNet
from distdl_rma import Machine, plan_prediction, predict

SIDE = int(os.environ.get("PREDICT_BENCH_SIDE", "2048"))
SLABS, CLASSES = 8, 100
# Of the prediction of a volume: less than a fifth of what a sliding window needs for it.
MEMORY = "640MiB"
# Of a prediction of small images.
LEAST_NBYTES = 1 << 27
# A call takes seconds.
REPETITIONS = 11


def rows(_machine: Machine) -> Iterator[Row]:
    """2-D without statistics, 2-D with instance norm on disk, 3-D with many classes."""
    if COMM.size > 1:
        raise SystemExit("benchmarks predict: a job of one rank measures it")
    folder = Path(tempfile.mkdtemp(prefix="predict-bench-", dir=os.environ.get("TMPDIR")))
    try:
        yield _in_slabs(folder, "batch norm", nn.BatchNorm2d, 1.1)
        yield _in_slabs(folder, "instance norm, on disk", nn.InstanceNorm2d, 1.5)
        yield from _many_classes(folder)
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


def _classes(y: torch.Tensor) -> torch.Tensor:
    return y.argmax(1).to(torch.uint8)

"""Steps that are compiled, and the same steps of split tensors, against the bare half of the work.

A step is forward, loss and backward with the sums of gradients. ``compiled`` is ``model.compile()``, ``with
its loss`` is ``capture`` with the loss in it, and ``replay`` is that without a compiler. The bare half is the
model alone on its half of the image, on both ranks at once. All of a case are measured in turn. A single
block is also written by hand, with mpi4py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.by_hand import step_of_block
from benchmarks.measure import Row, in_turn, summary
from distdl_rma import Machine, capture, distribute, shard


class Case(NamedTuple):
    """A model, channels in and out, extents, repetitions, and the ratio that a step shall reach."""

    model: Callable[[], nn.Module]
    channels: tuple[int, int]
    extents: tuple[int, ...]
    repetitions: int
    target: float


def block() -> nn.Module:
    """A convolution, a norm and an activation."""
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())


def blocks() -> nn.Module:
    """Six of them."""
    return nn.Sequential(*(block() for _ in range(6)))


def of_monai(name: str, **given: Any) -> Callable[[], nn.Module]:
    """A public network."""

    def made() -> nn.Module:
        model: nn.Module = getattr(import_module("monai.networks.nets"), name)(**given)
        return model

    return made


UNET = {"in_channels": 1, "out_channels": 2, "features": (16, 16, 32, 64, 128, 16)}
IMAGE_UNET, VOLUME_UNET = of_monai("BasicUNet", spatial_dims=2, **UNET), of_monai("BasicUNet", **UNET)
SEGRESNET = of_monai("SegResNet", spatial_dims=2, in_channels=1, out_channels=2)
CASES = {
    "conv, group norm, ReLU, 16x16": Case(block, (16, 16), (16, 16), 201, 1.8),
    "conv, group norm, ReLU, 128x128": Case(block, (16, 16), (128, 128), 101, 1.2),
    "conv, group norm, ReLU, 256x256": Case(block, (16, 16), (256, 256), 61, 0.85),
    "six such blocks, 128x128": Case(blocks, (16, 16), (128, 128), 41, 1.15),
    "BasicUNet, 256x256": Case(IMAGE_UNET, (1, 2), (256, 256), 21, 1.05),
    "BasicUNet, 384x384": Case(IMAGE_UNET, (1, 2), (384, 384), 15, 1.05),
    "SegResNet, 256x256": Case(SEGRESNET, (1, 2), (256, 256), 21, 1.12),
    "SegResNet, 384x384": Case(SEGRESNET, (1, 2), (384, 384), 15, 1.12),
    "BasicUNet, 48x48x48": Case(VOLUME_UNET, (1, 2), (48, 48, 48), 15, 0.26),
}


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    for what, case in CASES.items():
        # Public networks are not needed to run the others.
        if case.model in (block, blocks) or find_spec("monai"):
            yield from rows_of(what, case, machine)


def rows_of(what: str, case: Case, machine: Machine) -> Iterator[Row]:
    """A step of split tensors, a compiled model and compiled steps, against the bare half."""
    torch.manual_seed(1)
    alone = case.model()
    wholes = [torch.rand(1, channels, *case.extents) for channels in case.channels]
    half = [x.chunk(machine.size, 2)[machine.rank].contiguous() for x in wholes]
    models: list[Any] = [
        distribute(copy.deepcopy(alone), f"{machine.size}" + "x1" * (len(case.extents) - 1)) for _ in range(4)
    ]
    parts: list[torch.Tensor] = [shard(models[0].distributed.partition(x.dim()), x) for x in wholes]
    split, compiled, of_replay, of_step = models
    compiled.compile()
    replay = capture(lambda x, target: F.mse_loss(of_replay(x), target), backend="replay")
    step = capture(lambda x, target: F.mse_loss(of_step(x), target))
    by_hand = {"by hand": step_of_block(copy.deepcopy(alone), *half)} if case.model is block else {}
    samples = in_turn(
        by_hand
        | {
            "bare": step_of(alone, lambda x, target: F.mse_loss(alone(x), target), half),
            "split tensors": step_of(split, lambda x, target: F.mse_loss(split(x), target), parts),
            "replay with its loss": step_of(of_replay, replay, parts),
            "compiled": step_of(compiled, lambda x, target: F.mse_loss(compiled(x), target), parts),
            "compiled with its loss": step_of(of_step, step, parts),
        },
        case.repetitions,
    )
    found = {name: summary([1e6 * seconds for seconds in taken]) for name, taken in samples.items()}
    for name in [each for each in found if each != "bare"]:
        target = case.target if name == "compiled with its loss" else None
        yield Row(f"{what}: step, {name}", "bare half", *found[name], *found["bare"], target)
    for model in models:
        model.distributed.close()


def step_of(
    model: nn.Module, loss: Callable[..., torch.Tensor], given: list[torch.Tensor]
) -> Callable[[], object]:
    """A step without an optimizer."""

    def step() -> None:
        model.zero_grad()
        loss(*given).backward()

    return step

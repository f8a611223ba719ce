"""Layers on split tensors: microseconds that they add to a step, and steps against the bare tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from benchmarks.measure import Row, added, compare
from distdl_rma import Machine, Partition, distribute, shard
from distdl_rma.layers.split import SplitTensor

Step = Callable[[], object]
TIMES = 10


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    yield from small_rows(machine)
    yield from layer_rows(machine)


def small_rows(machine: Machine) -> Iterator[Row]:
    """Microseconds that a layer among others adds to a step on tiny tensors, of all that computes nothing."""
    for kind, (layer, shape, limit) in SMALL.items():
        P_x = machine.partition(tuple(machine.size if d == len(shape) - 2 else 1 for d in range(len(shape))))
        # The forward of a model begins and ends once, and its gradients are summed together.
        ours, bare = steps_of(P_x, partial(in_a_row, layer), shape)
        yield added(f"step of {kind} on 8x8, split tensors", ours, bare, limit, 10, TIMES)


def layer_rows(machine: Machine) -> Iterator[Row]:
    """Layers on split tensors against the bare tile: what it costs to be exact."""
    P_x = machine.partition((1, 1, machine.size, 1))
    for what, (layer, shape, limit, forward_limit) in LAYERS.items():
        ours, bare = steps_of(P_x, layer, shape)
        yield compare(
            f"step of {what}, split tensors", ours, bare, against="bare local tile", target=limit, inner=3
        )
        if forward_limit is not None:
            forward, bare_forward = forwards_of(P_x, layer, shape)
            yield compare(
                f"forward of {what}, split tensors",
                forward,
                bare_forward,
                against="bare local tile",
                target=forward_limit,
                inner=5,
            )


def steps_of(
    P_x: Partition, layer: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Step, Step]:
    """Forward and backward of a distributed layer, and of the same one on this rank's block alone.

    Anything but float32 is computed under autocast.
    """
    x = shard(P_x, torch.randn(shape).to(dtype))
    block = x.to_local().requires_grad_()
    cast = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)

    def step_of(model: nn.Module, forward: Callable[[], torch.Tensor]) -> Step:
        with torch.no_grad(), cast:
            gradient = torch.ones_like(forward())

        def step() -> None:
            block.grad = None
            model.zero_grad()
            with cast:
                y = forward()
            y.backward(gradient)

        return step

    ours, bare = distribute(layer(), P_x), layer()
    return (
        step_of(ours, lambda: ours(SplitTensor(block, x.decomposition)).to_local()),
        step_of(bare, lambda: bare(block)),
    )


def forwards_of(P_x: Partition, layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[Step, Step]:
    """Forwards alone."""
    x = shard(P_x, torch.randn(shape))
    ours, bare = distribute(layer(), P_x), layer()

    def without_graph(model: nn.Module, given: torch.Tensor) -> None:
        with torch.no_grad():
            model(given)

    return partial(without_graph, ours, x), partial(without_graph, bare, x.to_local())


def blocks_of_three(channels: int, times: int) -> nn.Sequential:
    """Convolutions, norms and activations in turn."""
    layers: list[nn.Module] = []
    for _ in range(times):
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        layers += [conv, nn.InstanceNorm2d(channels, affine=True), nn.ReLU()]
    return nn.Sequential(*layers)


def in_a_row(layer: Callable[[], nn.Module]) -> nn.Module:
    """So many layers, one after the other."""
    return nn.Sequential(*(layer() for _ in range(TIMES)))


# By kind: the layer, the global shape of its input, microseconds that it may add.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "a convolution": (lambda: nn.Conv2d(4, 4, 3, padding=1), (1, 4, 8, 8), 180.0),
    "an instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (1, 4, 8, 8), 180.0),
    "a linear": (lambda: nn.Linear(8, 8), (1, 8, 8), 110.0),
}
# The layer, the global shape of its input, ratios of a step and of a forward.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float | None]] = {
    "3x3 convolution, 16 channels, 256x256": (
        lambda: nn.Conv2d(16, 16, 3, padding=1),
        (1, 16, 256, 256),
        1.10,
        1.12,
    ),
    "3x3 convolution, 64 channels, 256x256": (
        lambda: nn.Conv2d(64, 64, 3, padding=1),
        (1, 64, 256, 256),
        1.03,
        1.03,
    ),
    "instance norm, 64 channels, 128x128": (
        lambda: nn.InstanceNorm2d(64, affine=True),
        (1, 64, 128, 128),
        1.25,
        None,
    ),
    "convolution, norm and activation six times, 16 channels, 128x128": (
        lambda: blocks_of_three(16, 6),
        (1, 16, 128, 128),
        1.20,
        None,
    ),
}

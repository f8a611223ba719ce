"""Small tensors, against what a user writes by hand with mpi4py: a convolution's step, and a repartition.

The step of a convolution, a group norm and an activation by hand is for ``compiled.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from benchmarks.measure import COMM, Row, compare
from benchmarks.training_step import forward_and_backward
from distdl_rma import GradientSync, Machine, distribute, shard
from distdl_rma.layers import DistributedConv2d, Repartition
from distdl_rma.layers.split import SplitTensor

CHANNELS, EXTENT = 4, 64
# Elements of float32 that all ranks have together: 256 KiB.
SIDE = 256
TARGET = 0.6


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    yield from convolution_rows(machine)
    yield repartition_row(machine)


def convolution_rows(machine: Machine) -> Iterator[Row]:
    """Forward, backward and the sum of the weights' gradients, as a layer and on split tensors."""
    P_x = machine.partition((1, 1, machine.size, 1))
    x = torch.randn(1, CHANNELS, EXTENT // machine.size, EXTENT, requires_grad=True)
    gradient = torch.randn_like(x)
    layout = shard(P_x, torch.empty(1, CHANNELS, EXTENT, EXTENT)).decomposition
    alone = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=(0, 1))
    layer = DistributedConv2d(P_x, CHANNELS, CHANNELS, 3, padding=1)
    model = distribute(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), P_x)

    def by_hand() -> None:
        x.grad = None
        alone.zero_grad()
        alone(HaloRows.apply(x)).backward(gradient)  # type: ignore[no-untyped-call]
        for parameter in alone.parameters():
            COMM.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())  # type: ignore[union-attr]

    def split() -> None:
        x.grad = None
        model.zero_grad()
        model(SplitTensor(x, layout)).to_local().backward(gradient)

    what = f"step of 3x3 convolution, {CHANNELS} channels, {EXTENT}x{EXTENT}"
    with GradientSync(layer, machine):
        ours = partial(forward_and_backward, layer, x, gradient)
        yield _small(what, ours, by_hand, "Isend, Irecv, cat and Allreduce by hand")
    yield _small(f"{what}, split tensors", split, by_hand, "Isend, Irecv, cat and Allreduce by hand")


def repartition_row(machine: Machine) -> Row:
    """Rows to columns."""
    size = machine.size
    layer = Repartition(machine.partition((size, 1)), machine.partition((1, size)))
    x = torch.randn(SIDE // size, SIDE)
    y, count = torch.empty(SIDE, SIDE // size), SIDE // size * SIDE // size

    def by_hand() -> None:
        packed = torch.cat([part.reshape(-1) for part in x.chunk(size, 1)])
        COMM.Alltoallv([packed.numpy(), [count] * size], [y.numpy(), [count] * size])

    def ours() -> None:
        with torch.no_grad():
            layer(x)

    what = f"Repartition ({size}, 1) to (1, {size}), {SIDE * SIDE * 4 >> 10} KiB"
    return _small(what, ours, by_hand, "cat and Alltoallv by hand")


def _small(what: str, ours: Callable[[], object], by_hand: Callable[[], object], against: str) -> Row:
    return compare(what, ours, by_hand, against=against, target=TARGET, inner=50)


class HaloRows(torch.autograd.Function):
    """This rank's rows between the nearest row of each neighbour, zeros where there is no neighbour."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        above, below = _exchanged(x[:, :, :1], x[:, :, -1:])
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        above, below = _exchanged(gradient[:, :, :1], gradient[:, :, -1:])
        mine = gradient[:, :, 1:-1].clone()
        mine[:, :, :1] += above
        mine[:, :, -1:] += below
        return mine


class NormOfAll(torch.autograd.Function):
    """Group norm of an image whose rows are on all ranks: one sum of moments, and one of the backward's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, groups: int, eps: float) -> torch.Tensor:
        parts = x.view(len(x), groups, -1)
        sums = torch.stack([each.sum(2, dtype=torch.float64) for each in (parts, parts * parts)])
        COMM.Allreduce(MPI.IN_PLACE, sums.numpy())
        ctx.count, ctx.groups = parts.shape[2] * COMM.size, groups
        mean, squares = sums / ctx.count
        mean, inverse = _of_channels(x, mean, (squares - mean * mean + eps).rsqrt())
        factor = inverse * weight
        ctx.save_for_backward(x, weight, mean, inverse)
        return torch.addcmul(_wide(bias - mean * factor), x, _wide(factor))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,), (x, weight, mean, inverse) = gradients, ctx.saved_tensors
        total, product = (each.sum((2, 3), dtype=torch.float64) for each in (gradient, gradient * x))
        product = (product - mean * total) * inverse
        pair = torch.stack([total, product]) * weight
        sums = pair.view(2, len(x), ctx.groups, -1).sum(3)
        COMM.Allreduce(MPI.IN_PLACE, sums.numpy())
        first, second = _of_channels(x, *(sums / ctx.count))
        slope = -second * inverse * inverse
        d_x = gradient * _wide(inverse * weight) + x * _wide(slope) - _wide(first * inverse + slope * mean)
        return d_x, product.sum(0).float(), total.sum(0).float(), None, None


def _of_channels(x: torch.Tensor, *of_groups: torch.Tensor) -> list[torch.Tensor]:
    return [each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in of_groups]


def _wide(of_channels: torch.Tensor) -> torch.Tensor:
    return of_channels.float()[..., None, None]


def step_of_block(block: Any, x: torch.Tensor, target: torch.Tensor) -> Callable[[], float]:
    """Step of a convolution, a group norm and an activation by hand; the ranks have as many rows each."""
    convolution, norm, activation = block
    convolution.padding = (0, 1)
    parameters = [*block.parameters()]
    counts = [each.numel() for each in parameters]

    def step() -> float:
        block.zero_grad()
        y = convolution(HaloRows.apply(x))  # type: ignore[no-untyped-call]
        y = NormOfAll.apply(y, norm.weight, norm.bias, norm.num_groups, norm.eps)  # type: ignore[no-untyped-call]
        loss = nn.functional.mse_loss(activation(y), target) / COMM.size
        value = loss.detach().clone()
        COMM.Allreduce(MPI.IN_PLACE, value.numpy())
        loss.backward()
        flat = torch.cat([each.grad.flatten() for each in parameters])
        COMM.Allreduce(MPI.IN_PLACE, flat.numpy())
        for parameter, part in zip(parameters, flat.split(counts), strict=True):
            parameter.grad = part.view(parameter.shape)
        return float(value)

    return step


def _exchanged(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # What the rank above sends of its last row, and the rank below of its first one.
    above, below = torch.zeros(first.shape), torch.zeros(last.shape)
    requests, sent = [], []
    for peer, mine, theirs in ((COMM.rank - 1, first, above), (COMM.rank + 1, last, below)):
        if 0 <= peer < COMM.size:
            sent.append(np.ascontiguousarray(mine.numpy()))
            requests += [COMM.Irecv(theirs.numpy(), peer), COMM.Isend(sent[-1], peer)]
    MPI.Request.Waitall(requests)
    return above, below

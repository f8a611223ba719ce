"""A model that nobody rewrote, on split tensors: against our layers, the bare tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.measure import Row, added, compare
from benchmarks.training_step import step_of
from benchmarks.unet import Layers, UNet, image
from distdl_rma import GradientSync, Machine, Partition, distribute, shard
from distdl_rma.layers import (
    DistributedBatchNorm2d,
    DistributedConcat,
    DistributedConv2d,
    DistributedConvTranspose2d,
    DistributedMaxPool2d,
    DistributedMSELoss,
)

WIDTH, SIDE = 16, 256
REPETITIONS = 31

Step = Callable[[], object]


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    yield from network_rows(machine)
    yield from dispatch_rows(machine)


def distributed_step(P_x: Partition, width: int, side: int) -> Step:
    """A step of the network as it is, on split tensors."""
    x, target = (shard(P_x, whole) for whole in image(side))
    return step_of(distribute(UNet(width), P_x), x, target, F.mse_loss)


def network_rows(machine: Machine) -> Iterator[Row]:
    """The model as it is against one that was rewritten, and against what the computation alone costs."""
    P_x = machine.partition((1, 1, machine.size, 1))
    ours = distributed_step(P_x, WIDTH, SIDE)
    # These take local blocks.
    x, target = (shard(P_x, whole).to_local() for whole in image(SIDE))
    layers = Layers(
        partial(DistributedConv2d, P_x),
        partial(DistributedBatchNorm2d, P_x),
        partial(DistributedMaxPool2d, P_x),
        partial(DistributedConvTranspose2d, P_x),
        lambda: DistributedConcat((P_x, P_x)),
    )
    rewritten = UNet(WIDTH, layers)
    sync = GradientSync(rewritten, machine)
    baselines = {
        "the same of our layers": (step_of(rewritten, x, target, DistributedMSELoss(P_x)), 1.03),
        "bare local tile": (step_of(UNet(WIDTH), x, target, F.mse_loss), 1.12),
    }
    what = f"training step, unmodified U-Net, width {WIDTH}, {SIDE}x{SIDE}"
    for against, (baseline, limit) in baselines.items():
        yield compare(what, ours, baseline, against=against, target=limit, repetitions=REPETITIONS)
    sync.close()


def dispatch_rows(machine: Machine) -> Iterator[Row]:
    """Microseconds that a function of split tensors takes above the function of their blocks."""
    P_x = machine.partition((1, 1, machine.size, 1))
    x = shard(P_x, torch.randn(1, 1, 8, 8))
    block = x.to_local()
    with torch.no_grad():
        yield added("dispatch of relu", lambda: F.relu(x), lambda: F.relu(block), 10.0, inner=1000)
        yield added("dispatch of x + x", lambda: x + x, lambda: block + block, 10.0, inner=1000)

"""Training steps: data parallel against torch's own, a split normalisation against the bare tile."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives import connect_gloo
from benchmarks.measure import COMM, Row, compare
from benchmarks.training_step import forward_and_backward, step_of
from distdl_rma import GradientSync, Machine
from distdl_rma.layers import DistributedInstanceNorm2d
from distdl_rma.segments import Allreduce
from distdl_rma.segments.collectives.all_push import AllPush

# Together 25 MiB of float32 parameters.
PIXELS, WIDTH, DEPTH, CLASSES = 784, 1352, 4, 10
BATCH = 256  # of each rank
CHANNELS, EXTENT = 64, 128


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on two ranks."""
    torch.set_num_threads(1)
    yield from data_parallel_rows(machine)
    yield norm_row(machine)
    yield from statistics_rows(machine)


def data_parallel_rows(machine: Machine) -> Iterator[Row]:
    """Steps of one network: forward, loss, backward, and the optimiser."""
    torch.manual_seed(1)
    alone = perceptron()
    synchronised, wrapped = copy.deepcopy(alone), copy.deepcopy(alone)
    connect_gloo()
    parallel = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    sync = GradientSync(synchronised, machine, reduction="mean")
    torch.manual_seed(2 + machine.rank)
    x, labels = torch.randn(BATCH, PIXELS), torch.randint(CLASSES, (BATCH,))
    ours = step_of(synchronised, x, labels, F.cross_entropy)
    what = f"data-parallel step, 25 MiB of parameters, batch {BATCH}"
    for baseline, against, target in (
        (parallel, "DistributedDataParallel, gloo", 0.9),
        (alone, "step without synchronisation", 1.15),
    ):
        yield compare(
            what, ours, step_of(baseline, x, labels, F.cross_entropy), against=against, target=target
        )
    sync.close()
    dist.destroy_process_group()


def perceptron() -> nn.Module:
    """Plain network of fully connected layers."""
    layers: list[nn.Module] = [nn.Linear(PIXELS, WIDTH), nn.ReLU()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def norm_row(machine: Machine) -> Row:
    """Instance norm, forward and backward, gradients of its parameters summed over the ranks."""
    grid = machine.partition((1, 1, machine.size, 1))
    layer = DistributedInstanceNorm2d(grid, CHANNELS, affine=True)
    bare = nn.InstanceNorm2d(CHANNELS, affine=True)
    x = torch.randn(1, CHANNELS, EXTENT // machine.size, EXTENT, requires_grad=True)
    gradient = torch.randn_like(x)

    return compare(
        f"training step, instance norm, {CHANNELS} channels, {EXTENT}x{EXTENT}",
        lambda: forward_and_backward(layer, x, gradient),
        lambda: forward_and_backward(bare, x, gradient),
        against="bare local tile",
        target=1.25,
        inner=20,
    )


def statistics_rows(machine: Machine) -> Iterator[Row]:
    """What a split norm sends: two float64 per channel, in forward and in backward."""
    count = 2 * CHANNELS
    row, total = np.ones(count), np.empty(count)
    forward = AllPush(machine.segments, machine.ranks, count, np.float64, "statistics")
    backward = Allreduce(machine.segments, machine.ranks, count, np.float64, name="sums", one_round=True)

    def gathered() -> None:
        forward.start(row)
        forward.wait()

    def summed() -> None:
        backward.active[:] = row
        backward.start()
        backward.wait()

    for label, ours in (("forward", gathered), ("backward", summed)):
        yield compare(
            f"statistics of {CHANNELS} channels, norm {label}",
            ours,
            lambda: COMM.Allreduce(row, total),
            against="mpi4py Allreduce",
            target=1.0,
            inner=500,
        )
    COMM.Barrier()
    forward.close()
    backward.close()

"""Movements against MPI's collectives, and layers against their local computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from benchmarks.measure import COMM, Row, added, compare, summary
from benchmarks.training_step import forward_and_backward
from distdl_rma import GradientSync, Machine
from distdl_rma.layers import (
    Broadcast,
    DistributedConv2d,
    DistributedInstanceNorm2d,
    DistributedLinearAllGather,
    Repartition,
    SumReduce,
)

SIDE = 4096  # of 64 MiB of float32
MESSAGE = 4 << 20  # elements of 16 MiB of float32
FEATURES, BATCH = 4096, 256
DEPTH = 100  # layers


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on two ranks."""
    torch.set_num_threads(1)
    yield from repartition_rows(machine)
    yield from reduction_rows(machine)
    yield from linear_rows(machine)
    yield from tiny_rows(machine)


def repartition_rows(machine: Machine) -> Iterator[Row]:
    size = machine.size
    layer = Repartition(machine.partition((size, 1)), machine.partition((1, size)))
    rows_, columns = SIDE // size, SIDE // size
    x = torch.randn(rows_, SIDE)
    array = x.numpy()
    send, received = (
        np.empty((size, rows_, columns), np.float32),
        np.empty((size, rows_, columns), np.float32),
    )

    y = np.empty((SIDE, columns), np.float32)

    def alltoall() -> None:
        for peer in range(size):
            send[peer] = array[:, peer * columns : (peer + 1) * columns]
        COMM.Alltoall(send, received)
        for peer in range(size):
            y[peer * rows_ : (peer + 1) * rows_] = received[peer]

    source, target = np.ones(rows_ * columns * (size - 1), np.float32), np.empty(rows_ * columns, np.float32)

    def copy() -> None:
        np.copyto(target, source)

    def ours() -> None:
        with torch.no_grad():
            layer(x)

    what = f"Repartition ({size}, 1) to (1, {size}), 64 MiB"
    yield compare(what, ours, alltoall, against="Alltoall, numpy packing", target=0.5)
    yield compare(what, ours, copy, against="copy of the moved bytes", target=2.6)


def reduction_rows(machine: Machine) -> Iterator[Row]:
    root, everyone = machine.partition().create_partition_inclusive([0]), machine.partition()
    broadcast, reduce_ = Broadcast(root, everyone), SumReduce(everyone, root)
    data, empty = torch.randn(MESSAGE), torch.empty(0)
    array, total = data.numpy().copy(), np.empty(MESSAGE, np.float32)

    def bcast() -> None:
        # As with the layer, the result is not the operand, on the root neither.
        if COMM.rank == 0:
            np.copyto(total, array)
        COMM.Bcast(total)

    def reduced() -> None:
        COMM.Reduce(array, total if COMM.rank == 0 else None, MPI.SUM, 0)

    def ours(call: Callable[[], torch.Tensor]) -> None:
        with torch.no_grad():
            call()

    yield compare(
        "Broadcast, 16 MiB",
        lambda: ours(lambda: broadcast(data if COMM.rank == 0 else empty)),
        bcast,
        against="MPI Bcast",
        target=0.8,
    )
    yield compare(
        "SumReduce, 16 MiB", lambda: ours(lambda: reduce_(data)), reduced, against="MPI Reduce", target=1.0
    )


def linear_rows(machine: Machine) -> Iterator[Row]:
    layer = DistributedLinearAllGather(machine.partition((1, machine.size)), FEATURES, FEATURES)
    x = torch.randn(BATCH, FEATURES // machine.size, requires_grad=True)
    whole = torch.randn(BATCH, FEATURES, requires_grad=True)
    local = nn.Linear(FEATURES, FEATURES // machine.size)
    gradient = torch.randn(BATCH, FEATURES // machine.size)

    yield compare(
        f"linear all-gather, {FEATURES}x{FEATURES}, batch {BATCH}, training step",
        lambda: forward_and_backward(layer, x, gradient),
        lambda: forward_and_backward(local, whole, gradient),
        against="its local matrix products",
        target=1.15,
        repetitions=31,
    )


def tiny_rows(machine: Machine) -> Iterator[Row]:
    """Microseconds that a layer adds on tiny tensors, forward and backward."""
    grid = machine.partition((1, 1, machine.size, 1))
    cases: dict[str, tuple[nn.Module, nn.Module]] = {
        "conv 3x3": (DistributedConv2d(grid, 1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)),
        "instance norm": (DistributedInstanceNorm2d(grid, 1), nn.InstanceNorm2d(1)),
        "linear all-gather": (
            DistributedLinearAllGather(machine.partition((1, machine.size)), 8, 8),
            nn.Linear(8, 8 // machine.size),
        ),
    }
    for what, (ours, bare) in cases.items():
        image = isinstance(bare, nn.Conv2d | nn.InstanceNorm2d)
        x = torch.randn((1, 1, 8 // machine.size, 8) if image else (8, 8 // machine.size), requires_grad=True)
        wide = x if image else torch.randn(8, 8, requires_grad=True)

        def step(module: nn.Module, data: torch.Tensor) -> None:
            module(data).sum().backward()

        yield added(f"{what}, 8x8", partial(step, ours, x), partial(step, bare, wide), 150.0, inner=50)


def setup_rows(machine: Machine) -> Iterator[Row]:
    """Milliseconds to construct a deep network and of its first step, all its connections included."""
    grid = machine.partition((1, 1, machine.size, 1))
    samples = []
    for _ in range(9):
        x = torch.randn(1, 4, 16, 64)
        COMM.Barrier()
        begin = time.perf_counter()
        layers: list[nn.Module] = []
        for _ in range(DEPTH // 4):
            layers += [DistributedConv2d(grid, 4, 4, 3, padding=1), DistributedInstanceNorm2d(grid, 4)]
            layers += [DistributedConv2d(grid, 4, 4, 1), DistributedConv2d(grid, 4, 4, 3, padding=1)]
        network = nn.Sequential(*layers)
        with GradientSync(network, machine):
            network(x).sum().backward()
        taken = time.perf_counter() - begin
        samples.append(COMM.allreduce(taken, op=MPI.MAX) * 1e3)
    what = f"{DEPTH} layers constructed, and their first step, on {machine.size} ranks"
    yield Row(what, "1 s", *summary(samples), 1000.0, 0.0, 1.0, unit="ms")

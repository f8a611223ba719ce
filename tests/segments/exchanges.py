"""Exchanges of all kinds, local tensors that tell rank and epoch, and their results."""

import time

import numpy as np

from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced


def line(machine):
    return machine.partition((machine.size,))


def halo(machine, extent=23):
    """Each rank needs its block and two elements on either side."""
    own = Decomposition.balanced(line(machine), (extent,))
    wide = WindowSplit(Balanced(extent, machine.size), Window(5, left=2, right=2), extent)
    return Exchange(machine.rank, own, own.with_splits({0: wide}))


def movements(machine):
    P = line(machine)
    root = P.create_partition_inclusive([0])
    whole, blocks = Decomposition.replicated(P, (12,)), Decomposition.balanced(P, (12,))
    at_root = Decomposition.replicated(root, (12,))
    pairs = {
        "broadcast": (at_root, whole),
        "sum_reduce": (whole, at_root),
        "all_gather": (blocks, whole),
        "reduce_scatter": (whole, blocks),
        "all_sum_reduce": (whole, whole),
    }
    made = {name: Exchange(machine.rank, *pair) for name, pair in pairs.items()}
    return {**made, "halo": halo(machine)}


NAMES = ["broadcast", "sum_reduce", "all_gather", "reduce_scatter", "all_sum_reduce", "halo"]


def values(exchange, rank, epoch):
    """Integers that tell rank and epoch, as local tensor x of a rank."""
    box = (exchange.target if exchange.transposed else exchange.source).box(rank)
    return np.arange(box.volume).reshape(box.shape) + 100 * rank + 1000 * epoch


def expected(exchange, epoch):
    """y = 0; y[box] += x[box] for all ranks, by brute force."""
    source = exchange.target if exchange.transposed else exchange.source
    need = exchange.need
    y = np.zeros(need.shape, np.int64)
    for rank in source.partition.ranks:
        own = source.box(rank)
        common = own & need
        if not common.empty:
            y[common.slices(need)] += values(exchange, rank, epoch)[common.slices(own)]
    return y


def gives_back(segments, owner):
    """Whether the memory of an owner that was closed is free again, as it is once its peers know of it."""
    deadline = time.monotonic() + 60
    while owner in segments.stats().owners and time.monotonic() < deadline:
        segments.progress()
    return owner not in segments.stats().owners


def arrive(channel, x, epoch, timeout=None):
    """Result of an epoch: what has landed, and what has to be copied."""
    exchange, y = channel.exchange, channel.take_result(epoch)
    if y is None:
        return channel.gather(x, epoch, np.add)
    for piece in exchange.local:
        y[piece.target.slices(exchange.need)] = x[piece.box.slices(exchange.own)]
    for landed, (piece, view) in zip(channel.landed, channel.receive(epoch, timeout), strict=True):
        if not landed:
            y[piece.box.slices(exchange.need)] = view
    return y

"""What a step moves, counted: on thousands of simulated ranks, and against the real counters."""

import math
import random

import numpy as np
import pytest

from benchmarks.traffic import Traffic, allreduce_traffic, broadcast_traffic, exchange_traffic
from distdl_rma.geometry import Decomposition, Exchange, Partition
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.segments.collectives.node_layout import NodeLayout
from tests.segments.collectives.test_node_layout import machine_nodes

COUNTERS = ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective")
MACHINES = [(2, 2), (4, 4), (8, 4), (64, 16), (256, 64), (1024, 4), (1024, 64)]


def layouts(size, per_node):
    nodes = machine_nodes(size, per_node)
    return [NodeLayout(tuple(range(size)), nodes, me) for me in range(size)]


@pytest.mark.parametrize(("size", "per_node"), MACHINES)
def test_collectives_cost_a_rank_its_node_and_a_logarithm_and_a_constant_times_the_payload(size, per_node):
    count, between = 1 << 22, math.ceil(math.log2(math.ceil(size / per_node)))
    for layout in layouts(size, per_node):
        traffic = allreduce_traffic(layout, count, 4)
        assert traffic.puts <= per_node and traffic.gets <= per_node
        assert traffic.messages <= 2 * (per_node + between)
        assert traffic.nbytes <= 4 * 4 * count + 64
        for one_round in (False, True):
            small = allreduce_traffic(layout, 64, 8, one_round=one_round)
            assert small.messages <= max(31, 2 * per_node + 2 * math.ceil(math.log2(size)))
        traffic = broadcast_traffic(layout, 0, count)
        assert traffic.messages <= max(1, 2 * between) and traffic.nbytes <= 2 * count


def halo_of(P_x, shape):
    """Blocks, and what windows of three elements read of them."""
    own, window = Decomposition.balanced(P_x, shape), Window(3, left=1, right=1)
    reads = {d: WindowSplit(split, window, split.extent) for d, split in enumerate(own.splits)}
    return Exchange(P_x.me, own, own.with_splits(reads))


@pytest.mark.parametrize("grid", [(2,), (1024,), (8, 8), (32, 32), (8, 8, 16)])
def test_a_halo_exchange_costs_its_neighbours_only(grid):
    size = math.prod(grid)
    for me in random.Random(0).sample(range(size), min(size, 20)):
        exchange = halo_of(Partition(tuple(range(size)), grid, me=me), tuple(10 * n for n in grid))
        traffic = exchange_traffic(exchange, 4)
        assert traffic.puts <= 3 ** len(grid) - 1
        assert traffic.bytes_put <= 4 * (12 ** len(grid) - 10 ** len(grid))


@pytest.mark.mpi
@pytest.mark.parametrize("count", [3, 50_001])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.usefixtures("cut")
def test_real_collectives_and_halo_exchanges_move_what_was_counted(segments, closing, count, dtype):
    from distdl_rma.segments import Allreduce, Bcast, Channel

    ranks, root, nbytes = segments.ranks, segments.ranks[-1], np.dtype(dtype).itemsize
    layout = NodeLayout(ranks, segments.segment.direct_nodes, segments.rank)
    exchange = halo_of(Partition(ranks, (len(ranks),), me=segments.rank), (40,))
    total = closing(Allreduce(segments, ranks, count, dtype, name="sum"))
    told = closing(Bcast(segments, ranks, count, dtype, root))
    channel = closing(Channel(segments, exchange, dtype, "counted halo"))
    x = np.ones(exchange.own.shape, dtype)
    for made, move, expected in (
        (
            total,
            lambda: (total.start(), total.wait()),
            allreduce_traffic(layout, count, nbytes, wide_itemsize=4),
        ),
        (told, lambda: (told.start(), told.wait()), broadcast_traffic(layout, root, nbytes * count)),
        (channel, lambda: channel.move(x), exchange_traffic(exchange, nbytes)),
    ):
        made.connect()
        before = [getattr(segments.counters, name) for name in COUNTERS]
        move()
        found = [getattr(segments.counters, name) - was for name, was in zip(COUNTERS, before, strict=True)]
        assert Traffic(*found, across=len(layout.nodes) if found[4] else 1) == expected, made

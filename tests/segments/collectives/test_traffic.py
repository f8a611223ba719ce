"""What a step moves, counted: on thousands of simulated ranks, and against the real counters."""

import math
import random

import numpy as np
import pytest

from benchmarks.traffic import (
    Traffic,
    allreduce_traffic,
    broadcast_traffic,
    exchange_traffic,
)
from distdl_rma.geometry import Decomposition, Exchange, Partition
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.collectives import between_nodes
from distdl_rma.segments.collectives.node_layout import NodeLayout
from tests.segments.collectives.test_node_layout import machine_nodes

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


@pytest.mark.parametrize("grid", [(2,), (1024,), (8, 8), (32, 32), (8, 8, 16)])
def test_a_halo_exchange_costs_its_neighbours_only(grid):
    size = math.prod(grid)
    extents = tuple(10 * n for n in grid)
    window = Window(3, left=1, right=1)
    for me in random.Random(0).sample(range(size), min(size, 20)):
        P_x = Partition(tuple(range(size)), grid, me=me)
        own = Decomposition.balanced(P_x, extents)
        reads = {
            d: WindowSplit(Balanced(window.outputs(n), parts), window, n)
            for d, (n, parts) in enumerate(zip(extents, grid, strict=True))
        }
        traffic = exchange_traffic(Exchange(me, own, own.with_splits(reads)), 4)
        assert traffic.puts <= 3 ** len(grid) - 1
        assert traffic.bytes_put <= 4 * (12 ** len(grid) - 10 ** len(grid))


@pytest.fixture(params=[8 << 20, 10_000], ids=["whole", "in pieces"])
def least(request, monkeypatch):
    """Bytes of a piece of what goes between nodes."""
    monkeypatch.setattr(between_nodes, "_LEAST_NBYTES", request.param)
    monkeypatch.setattr(between_nodes, "_LEAST_OF_NODE", 1)


@pytest.mark.mpi
@pytest.mark.parametrize("count", [3, 50_001])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.usefixtures("least")
def test_real_collectives_move_what_was_counted(segments, count, dtype):
    from distdl_rma.segments import Allreduce, Bcast

    ranks, root, nbytes = segments.ranks, segments.ranks[-1], np.dtype(dtype).itemsize
    layout, wide = NodeLayout(ranks, segments.segment.direct_nodes, segments.rank), {"wide_itemsize": 4}
    for job, expected in (
        (
            Allreduce(segments, ranks, count, dtype, name="sum"),
            allreduce_traffic(layout, count, nbytes, **wide),
        ),
        (Bcast(segments, ranks, count, dtype, root), broadcast_traffic(layout, root, nbytes * count)),
    ):
        job.active[:] = 1
        assert moved(segments, job) == expected, job
        job.close()


@pytest.mark.mpi
def test_the_real_halo_exchange_moves_what_was_counted(segments):
    from distdl_rma.segments import Channel

    P_x = Partition(segments.ranks, (len(segments.ranks),), me=segments.rank)
    window = Window(3, left=1, right=1)
    own = Decomposition.balanced(P_x, (40,))
    reads = {0: WindowSplit(Balanced(window.outputs(40), P_x.size), window, 40)}
    exchange = Exchange(segments.rank, own, own.with_splits(reads))
    channel = Channel(segments, exchange, np.float32, "counted halo")
    x = np.ones(own.box(segments.rank).shape, np.float32)
    before = segments.counters.puts, segments.counters.bytes_put
    channel.move(x)
    expected = exchange_traffic(exchange, 4)
    counters = segments.counters
    assert (counters.puts - before[0], counters.bytes_put - before[1]) == (expected.puts, expected.bytes_put)
    channel.close()


def moved(segments, job):
    job.connect()
    names = ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective")
    before = [getattr(segments.counters, name) for name in names]
    job.start()
    job.wait()
    found = [getattr(segments.counters, name) - was for name, was in zip(names, before, strict=True)]
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    return Traffic(*found, across=len(layout.nodes) if found[4] else 1)

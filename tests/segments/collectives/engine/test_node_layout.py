"""Who sends what to whom, counted: on thousands of simulated ranks, and against the real counters."""

import math
import random

import numpy as np
import pytest

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry import Decomposition, Exchange, Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.geometry.stencil import Window, WindowSplit
from distdl_rma.segments.collectives.engine import node_layout as schedule
from distdl_rma.segments.collectives.engine.alltoall_blocks import AlltoallBlocks, alltoall_traffic
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout

MACHINES = [(2, 2), (4, 4), (8, 4), (64, 16), (256, 64), (1024, 4), (1024, 64)]


def machine_nodes(size, per_node):
    ranks = tuple(range(size))
    return tuple(ranks[begin : begin + per_node] for begin in range(0, size, per_node))


def layouts(size, per_node):
    nodes = machine_nodes(size, per_node)
    return [NodeLayout(tuple(range(size)), nodes, me) for me in range(size)]


@pytest.mark.parametrize("seed", range(30))
def test_shares_of_a_node_are_the_whole_vector_and_meet_the_same_share_elsewhere(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 30)
    order = rng.sample(range(40), size)
    cuts = sorted(rng.sample(range(1, 40), rng.randint(0, 6)))
    nodes = tuple(tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, 40], strict=True))
    count = rng.randint(0, 50)
    for me in order:
        layout = NodeLayout(tuple(order), nodes, me)
        assert sorted(rank for node in layout.nodes for rank in node) == sorted(order)
        covered = []
        for holder in layout.holders:
            covered += range(*NodeLayout(tuple(order), nodes, holder).share(count))
        assert covered == list(range(count))
        shares = {NodeLayout(tuple(order), nodes, rank).share(count) for rank in layout.lane_ranks}
        assert len(shares) <= 1
        assert len(layout.lane_ranks) == (0 if layout.lane is None else len(layout.nodes))


@pytest.mark.parametrize("seed", range(30))
def test_every_part_of_a_reduce_scatter_is_reduced_once_on_each_node_and_kept_on_its_own(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    order = rng.sample(range(12), size)
    per_node = rng.randint(1, 12)
    nodes = machine_nodes(12, per_node)
    lengths = [rng.choice([0, 1, 2, 9]) for _ in order]
    for number, node in enumerate(NodeLayout(tuple(order), nodes, order[0]).nodes):
        reduced = []
        for me in node:
            layout = NodeLayout(tuple(order), nodes, me)
            assert layout.my_node == number
            if layout.lane is None:
                assert not any(layout.scatter_pieces(lengths))
            for target, spans in zip(layout.nodes, layout.scatter_pieces(lengths), strict=True):
                assert all(span.peer in target for span in spans)
                reduced += [i for span in spans for i in range(span.start, span.stop)]
        assert sorted(reduced) == list(range(sum(lengths)))


@pytest.mark.parametrize(("size", "per_node"), MACHINES)
def test_allreduce_costs_a_rank_its_node_and_a_logarithm_and_a_constant_times_the_payload(size, per_node):
    count = 1 << 22
    for layout in layouts(size, per_node):
        traffic = schedule.allreduce_traffic(layout, count, 4)
        nodes = math.ceil(size / per_node)
        assert traffic.puts <= per_node and traffic.gets <= per_node
        assert traffic.messages <= 2 * (per_node + math.ceil(math.log2(nodes)))
        assert traffic.nbytes <= 4 * 4 * count + 64


@pytest.mark.parametrize(("size", "per_node"), MACHINES)
def test_a_small_allreduce_costs_a_bounded_number_of_messages(size, per_node):
    for layout in layouts(size, per_node):
        for one_round in (False, True):
            traffic = schedule.allreduce_traffic(layout, 64, 8, one_round=one_round)
            assert traffic.messages <= max(31, 2 * per_node + 2 * math.ceil(math.log2(size)))


@pytest.mark.parametrize(("size", "per_node"), MACHINES)
def test_broadcast_costs_nobody_more_than_a_logarithm(size, per_node):
    nbytes = 1 << 20
    for layout in layouts(size, per_node):
        traffic = schedule.broadcast_traffic(layout, 0, nbytes)
        assert traffic.messages <= max(1, 2 * math.ceil(math.log2(math.ceil(size / per_node))))
        assert traffic.nbytes <= 2 * nbytes


@pytest.mark.parametrize(("size", "per_node"), MACHINES[:4])
def test_a_reduction_to_a_root_costs_a_rank_its_node_and_a_logarithm_and_a_constant_times_the_payload(
    size, per_node
):
    count, root = 1 << 20, size // 2
    total = 0
    for layout in layouts(size, per_node):
        traffic = schedule.reduce_traffic(layout, root, count, 4)
        assert traffic.puts <= 1 and traffic.gets <= per_node
        assert traffic.messages <= 1 + per_node + math.ceil(math.log2(math.ceil(size / per_node)))
        assert traffic.nbytes <= 3 * 4 * count
        total += traffic.bytes_put
    # The holders of the root's node store to it all but what it reduces itself.
    assert total <= 4 * count


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (8, 4), (12, 5), (64, 16)])
def test_an_all_to_all_moves_every_block_once_and_shares_the_work_between_nodes(size, per_node):
    count = 7
    rows = ((count,) * size,) * size
    found = [alltoall_traffic(layout, rows, 4) for layout in layouts(size, per_node)]
    nodes = layouts(size, per_node)[0].nodes
    between = size**2 - sum(len(node) ** 2 for node in nodes)
    assert sum(traffic.bytes_collective for traffic in found) == 4 * count * between
    lanes = min(map(len, nodes))
    for traffic in found:
        assert traffic.bytes_collective <= 4 * count * size * math.ceil(max(map(len, nodes)) / lanes)


@pytest.mark.parametrize("seed", range(30))
def test_every_block_of_an_all_to_all_is_sent_by_one_rank_and_taken_by_one(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    order = tuple(rng.sample(range(12), size))
    nodes = machine_nodes(12, rng.randint(1, 12))
    rows = tuple(tuple(rng.choice((0, 1, 9)) for _ in order) for _ in order)
    sent, taken = [], []
    for me in order:
        layout = NodeLayout(order, nodes, me)
        blocks = AlltoallBlocks(layout, rows)
        for node, out, came in zip(layout.nodes, blocks.outgoing(), blocks.incoming(), strict=True):
            assert all(route.source in layout.here and route.target in node for route in out)
            assert all(route.source in node and route.target in layout.here for route in came)
            sent += [(route.source, route.target) for route in out]
            taken += [(route.source, route.target) for route in came]
            # What one sends is what the other takes, in the same order.
            peer = layout.lane if layout.lane is not None and node != layout.here else None
            if peer is not None:
                there = AlltoallBlocks(NodeLayout(order, nodes, node[peer]), rows)
                assert there.incoming()[layout.my_node] == out
    far = [
        (a, b)
        for i, a in enumerate(order)
        for j, b in enumerate(order)
        if rows[i][j] and not any(a in node and b in node for node in nodes)
    ]
    assert sorted(sent) == sorted(far) == sorted(taken)


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
        traffic = schedule.exchange_traffic(Exchange(me, own, own.with_splits(reads)), 4)
        assert traffic.puts <= 3 ** len(grid) - 1
        assert traffic.bytes_put <= 4 * (12 ** len(grid) - 10 ** len(grid))


def test_wrong_numbers_are_named():
    with pytest.raises(ShapeError, match="'x': a number of elements is an integer"):
        schedule.check_count(1.5, "x")
    with pytest.raises(ShapeError, match="'x': 2 ranks need 2 numbers of elements"):
        schedule.check_lengths([1], 2, "x")
    with pytest.raises(PartitionError, match="'x': ranks must be unique"):
        NodeLayout.checked((0, 0), ((0, 1),), 0, "x")


@pytest.mark.mpi
@pytest.mark.parametrize("count", [3, 50_001])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_real_allreduce_moves_what_was_counted(segments, count, dtype):
    from distdl_rma.segments import Allreduce

    job = Allreduce(segments, segments.ranks, count, dtype, name=f"counted {count}")
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    job.active[:] = 1
    found = moved(segments, job)
    itemsize = np.dtype(dtype).itemsize
    assert found == schedule.allreduce_traffic(layout, count, itemsize, wide_itemsize=4)
    job.close()


@pytest.mark.mpi
@pytest.mark.parametrize("count", [3, 50_001])
def test_the_real_broadcast_moves_what_was_counted(segments, count):
    from distdl_rma.segments import Bcast

    root = segments.ranks[-1]
    job = Bcast(segments, segments.ranks, count, np.float64, root, f"counted {count}")
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    assert moved(segments, job) == schedule.broadcast_traffic(layout, root, 8 * count)
    job.close()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_real_reduction_to_a_root_moves_what_was_counted(segments, dtype):
    from distdl_rma.segments import Reduce

    root, count, itemsize = segments.ranks[-1], 50_001, np.dtype(dtype).itemsize
    job = Reduce(segments, segments.ranks, count, dtype, "sum", root, "counted")
    job.active[:] = 1
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    assert moved(segments, job) == schedule.reduce_traffic(layout, root, count, itemsize, wide_itemsize=4)
    job.close()


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(5))
def test_the_real_all_to_all_moves_what_was_counted(segments, seed):
    from distdl_rma.segments import Alltoall

    rng = random.Random(seed)
    rows = tuple(tuple(rng.choice((0, 1, 300)) for _ in segments.ranks) for _ in segments.ranks)
    job = Alltoall(segments, segments.ranks, rows, np.float64, "counted")
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    found, expected = moved(segments, job), alltoall_traffic(layout, rows, 8)
    assert found == expected
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
    expected = schedule.exchange_traffic(exchange, 4)
    counters = segments.counters
    assert (counters.puts - before[0], counters.bytes_put - before[1]) == (expected.puts, expected.bytes_put)
    channel.close()


def moved(segments, job):
    def now():
        counters = segments.counters
        return np.array(
            [
                counters.puts,
                counters.bytes_put,
                counters.gets,
                counters.bytes_got,
                counters.collectives,
                counters.bytes_collective,
            ]
        )

    before = now()
    job.start()
    job.wait()
    found = (now() - before).tolist()
    layout = NodeLayout(segments.ranks, segments.segment.direct_nodes, segments.rank)
    return schedule.Traffic(*found, across=len(layout.nodes) if found[4] else 1)

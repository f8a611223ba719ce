"""The process group: every call against what it means, on every kind of nodes and on groups of some ranks."""

import random
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from distdl_rma.errors import ClosedError, ExchangeTimeout
from distdl_rma.torch_backend import inter_node
from distdl_rma.torch_backend.group import RmaProcessGroup
from distdl_rma.torch_backend.node_slots import NodeSlots
from tests.matrix import over_seeds
from tests.torch_backend.backends import options

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

SHORT = [torch.float16, torch.bfloat16]
TYPES = [torch.float32, torch.float64, *SHORT, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
# Nothing, one round that all reduce whole, shares of one round and of several, with a rest.
COUNTS = [0, 1, 5, 1000, 40_001, 1_200_007]
FUNCTIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BITS = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
# For those who come, on a machine that has other things to do.
LONG = timedelta(seconds=60)


@pytest.fixture(scope="module")
def group(segments):
    ranks = [*segments.ranks[::2], *segments.ranks[1::2]]
    group = RmaProcessGroup(segments, ranks, "interleaved", None)
    yield group
    group.shutdown()


@pytest.fixture(params=[8 << 20, 1 << 16], ids=["at once", "in turns"])
def most(request, group, monkeypatch):
    """Bytes that go between nodes at once; on one node nothing does."""
    if request.param < 8 << 20 and isinstance(group._callers, NodeSlots):
        pytest.skip("the ranks are on one node")
    monkeypatch.setattr(inter_node, "TURN_BYTES", request.param)
    return request.param


def values(rank, count, dtype, step=0):
    return torch.randint(-4, 5, (count,), generator=torch.Generator().manual_seed(97 * rank + step)).to(dtype)


def rows(group, count, dtype, op=ReduceOp.SUM):
    # Sums that short floats do not hold, and that are rounded once.
    more = 256 if dtype in SHORT and op in (ReduceOp.SUM, ReduceOp.AVG) else 0
    return [values(rank, count, dtype) + more for rank in range(group.size())]


def reduced(op, rows):
    wide = torch.float32 if rows[0].dtype in SHORT else rows[0].dtype
    total = rows[0].to(wide)
    for row in rows[1:]:
        total = FUNCTIONS[op](total, row.to(wide))
    return (total / len(rows) if op == ReduceOp.AVG else total).to(rows[0].dtype)


@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_reduction_is_in_the_order_of_the_ranks_and_rounded_once(group, dtype, monkeypatch):
    me, size = group.rank(), group.size()
    # Between nodes at once, or in turns.
    monkeypatch.setattr(inter_node, "TURN_BYTES", (8 << 20, 1 << 16)[TYPES.index(dtype) % 2])
    for count in COUNTS if dtype in (torch.float32, torch.bfloat16) else COUNTS[:-1]:
        for op in FUNCTIONS:
            if op in BITS if dtype.is_floating_point else op == ReduceOp.AVG:
                continue
            everyone = rows(group, count, dtype, op)
            total = reduced(op, everyone)
            group.allreduce([x := everyone[me].clone()], options(AllreduceOptions, op)).wait()
            assert torch.equal(x, total), (count, op)
            for root in range(size) if count == 5 else [count % size]:
                group.reduce([x := everyone[me].clone()], options(ReduceOptions, op, root)).wait()
                assert torch.equal(x, total if me == root else everyone[me]), (count, op, root)


def test_movements_of_all_kinds(group, most):
    me, size = group.rank(), group.size()
    for count in (0, 3, 70_001) if most < 1 << 20 else (0, 3, 70_001, 2_100_000):
        dtype = random.Random(count).choice([torch.float32, torch.bfloat16, torch.bool, torch.complex64])
        everyone = [values(rank, count, dtype) for rank in range(size)]
        for root in range(size) if count == 3 else [count % size]:
            x = values(me, count, dtype)
            group.broadcast([x], options(BroadcastOptions, root=root)).wait()
            assert torch.equal(x, everyone[root])
        outs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        group.allgather([outs], [everyone[me]]).wait()
        assert all(map(torch.equal, outs, everyone))
        whole = torch.empty(count * size, dtype=dtype)
        group.all_gather_single(whole, everyone[me]).wait()
        assert torch.equal(whole, torch.cat(everyone))
        outs = [torch.empty(count, dtype=dtype) for _ in range(size)] if me == root else []
        group.gather([outs] if outs else [], [everyone[me]], options(GatherOptions, root=root)).wait()
        assert all(map(torch.equal, outs, everyone))
        out, parts = torch.empty(count, dtype=dtype), everyone if me == root else []
        group.scatter([out], [parts] if parts else [], options(ScatterOptions, root=root)).wait()
        assert torch.equal(out, everyone[me])
        group.barrier().wait()


def test_reduce_scatter_gives_each_rank_its_part(group, most):
    me, size = group.rank(), group.size()
    for count in (1, 777, 60_000):
        everyone = rows(group, count * size + size**2, torch.bfloat16)
        mine, out = everyone[me][: count * size].clone(), torch.empty(count, dtype=torch.bfloat16)
        group.reduce_scatter_single(out, mine, options(ReduceScatterOptions, ReduceOp.MAX)).wait()
        whole = [row[: count * size] for row in everyone]
        assert torch.equal(out, reduced(ReduceOp.MAX, whole).chunk(size)[me])
        assert torch.equal(mine, whole[me])
        # A part for each rank, one longer than that of the rank before.
        lengths = [count + rank for rank in range(size)]
        out = torch.empty(lengths[me], dtype=torch.bfloat16)
        group.reduce_scatter([out], [list(everyone[me][: sum(lengths)].split(lengths))]).wait()
        assert torch.equal(out, reduced(ReduceOp.SUM, everyone)[: sum(lengths)].split(lengths)[me])


def test_uneven_sizes(group, most):
    me, size = group.rank(), group.size()
    outs = [torch.empty(rank * 60_000 + 1) for rank in range(size)]
    group.allgather([outs], [torch.full((me * 60_000 + 1,), float(me))]).wait()
    assert all((out == rank).all() for rank, out in enumerate(outs))
    inputs = [torch.full((me * 50_000 + rank,), 10.0 * me + rank) for rank in range(size)]
    outs = [torch.empty(rank * 50_000 + me) for rank in range(size)]
    group.alltoall(outs, inputs).wait()
    assert all((out == 10 * rank + me).all() for rank, out in enumerate(outs))
    x, y = torch.cat(inputs).view(-1, 1), torch.empty(sum(out.numel() for out in outs), 1)
    group.all_to_all_single(y, x, [out.numel() for out in outs], [i.numel() for i in inputs]).wait()
    assert torch.equal(y.view(-1), torch.cat(outs))
    z = torch.arange(3.0 * size) + 100 * me
    w = torch.empty_like(z)
    group.all_to_all_single(w, z).wait()
    assert torch.equal(w, torch.cat([torch.arange(3.0) + 3 * me + 100 * rank for rank in range(size)]))


def test_several_tensors_at_a_time(group):
    mine = [torch.full((k,), float(group.rank())) for k in (2, 5)]
    outs = [[torch.empty(k) for k in (2, 5)] for _ in range(group.size())]
    group.allgather_coalesced(outs, mine).wait()
    assert all((out == rank).all() for rank, some in enumerate(outs) for out in some)


def test_input_may_be_a_view_of_the_output_and_the_output_of_the_input(group):
    me, size, count = group.rank(), group.size(), 5000
    whole = torch.full((size * count,), -1.0)
    whole[me * count : (me + 1) * count] = me
    group.all_gather_single(whole, whole[me * count : (me + 1) * count]).wait()
    assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(count))
    for target in range(size):
        x = values(me, size * count, torch.float32)
        # The root's tensor lies where another rank's is stored.
        parts, root = list(x.clone().chunk(size)), (target + 1) % size
        mine = parts[target if me == root else me]
        outs = [parts] if me == root else []
        group.gather(outs, [mine], options(GatherOptions, root=root)).wait()
        for rank, part in enumerate(parts if me == root else ()):
            expected = values(rank, size * count, torch.float32).chunk(size)
            assert torch.equal(part, expected[target if rank == root else rank])
        out = x.chunk(size)[target]
        group.reduce_scatter_single(out, x).wait()
        assert torch.equal(out, sum(rows(group, size * count, torch.float32)).chunk(size)[me])


def test_tensors_that_are_not_contiguous_or_need_a_gradient(group):
    x = torch.ones(40, 30).t()
    group.allreduce([x]).wait()
    assert (x == group.size()).all()
    y = torch.ones(3, 5, requires_grad=True)
    with torch.no_grad():
        group.allreduce([y]).wait()
        group.broadcast([y[:, ::2]]).wait()
    assert (y == group.size()).all()


def test_wholes_that_are_transposed_are_cut_into_rows(group):
    size, me = group.size(), group.rank()
    wholes = [torch.arange(6.0 * size).view(3, 2 * size).t() + rank for rank in range(size)]
    out = torch.empty(3, 2).t()
    group.reduce_scatter_single(out, wholes[me]).wait()
    assert torch.equal(out, sum(wholes)[2 * me : 2 * me + 2])
    gathered = torch.empty(3, 2 * size).t()
    group.all_gather_single(gathered, out).wait()
    assert torch.equal(gathered, sum(wholes))


@over_seeds(3)
def test_calls_in_flight_are_waited_for_in_any_order(group, seed, most):
    rng, mine = random.Random(seed), random.Random(100 * seed + group.rank())
    size, begun = group.size(), []
    for step in range(30):
        count, kind, root = rng.choice([1, 100, 30_000, 400_000]), rng.randrange(3), step % group.size()
        if mine.random() < 0.2:
            time.sleep(2e-3)
        everyone = [values(rank, count, torch.float32, step) for rank in range(size)]
        x = everyone[group.rank()].clone()
        if kind == 0:
            begun.append((group.allreduce([x]), x, sum(everyone)))
        elif kind == 1:
            work = group.broadcast([x], options(BroadcastOptions, root=root))
            begun.append((work, x, everyone[root]))
        else:
            whole = torch.empty(count * size)
            begun.append((group.all_gather_single(whole, x), whole, torch.cat(everyone)))
        if mine.random() < 0.3:
            work, got, expected = begun.pop(mine.randrange(len(begun)))
            work.wait()
            assert torch.equal(got, expected)
    for work, got, expected in begun:
        future = work.get_future()
        assert future.wait() is not None
        assert torch.equal(got, expected)
        assert work.is_completed()
        assert work.is_success()


def test_messages_are_matched_by_tag_and_follow_one_another(group):
    me, size = group.rank(), group.size()
    after, before = (me + 1) % size, (me - 1) % size
    if size == 1:
        return
    sends = [group.send([torch.full((k + 1,), 10.0 * me + k)], after, k % 2) for k in range(6)]
    outs = [torch.empty(k + 1) for k in range(6)]
    receives = [group.recv([outs[k]], before, k % 2) for k in range(6)]
    for work in random.Random(me).sample([*sends, *receives], 12):
        work.wait()
    assert all((out == 10 * before + k).all() for k, out in enumerate(outs))
    big = torch.full((300_000,), float(me), dtype=torch.bfloat16)
    out = torch.empty_like(big)
    work = group.send([big], after, 7)
    source = group.recv_anysource([out], 7)
    source.wait()
    work.wait()
    assert source.source_rank() == before
    assert (out == before).all()


def test_groups_of_some_ranks_at_once(machine, comm):
    subsets = [
        ranks for ranks in ([0, 1], [1, 2], [2, 0], [3, 1], list(range(comm.size))) if max(ranks) < comm.size
    ]
    groups = {
        k: RmaProcessGroup(machine.segments, ranks, f"some {k}", None)
        for k, ranks in enumerate(subsets)
        if comm.rank in ranks
    }
    works = {k: (x := torch.full((60_000,), 1.0 + k), group.allreduce([x])) for k, group in groups.items()}
    for k in random.Random(comm.rank).sample(sorted(works), len(works)):
        works[k][1].wait()
        assert (works[k][0] == (1 + k) * len(subsets[k])).all()
    for group in groups.values():
        group.shutdown()
    comm.Barrier()
    assert not any(owner.startswith("process group some") for owner in machine.segments.stats().owners)
    for group in groups.values():
        with pytest.raises(ClosedError, match="already closed"):
            group.barrier()


def test_a_rank_that_does_not_come_is_named_and_may_come_later(machine, comm):
    if comm.size == 1:
        return
    group = RmaProcessGroup(machine.segments, machine.ranks, "late", 0.3)
    x = torch.ones(3)
    if comm.rank == 0:
        work = group.allreduce([x])
        for _ in range(2):
            with pytest.raises(
                ExchangeTimeout, match=r"rank 0 waited 0.3 s for rank.* in all_reduce\(sum\) of 3 x"
            ):
                work.wait()
        with pytest.raises(ExchangeTimeout, match=r"rank 0 waited 0.3 s for rank.* in all_reduce\(sum\) of"):
            work.get_future().wait()
        comm.Barrier()
        work.wait(LONG)
    else:
        comm.Barrier()
        group.allreduce([x]).wait(LONG)
    assert (x == comm.size).all()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout, match="monitored_barrier"):
            group.monitored_barrier()
    comm.Barrier()
    if comm.rank:
        group.monitored_barrier(LONG)
    comm.Barrier()

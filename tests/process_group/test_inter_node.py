"""Collectives by MPI between nodes: of ranks alone on theirs, and by way of leaders, each element once."""

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from torch.distributed import BroadcastOptions, ReduceOp, ReduceOptions
from torch.distributed.distributed_c10d import AllreduceOptions

from distdl_rma.errors import MismatchError
from distdl_rma.process_group import inter_node
from distdl_rma.process_group.group import RmaProcessGroup
from distdl_rma.process_group.inter_node import InterNodeCollectives
from distdl_rma.process_group.node_slots import Call
from distdl_rma.process_group.reducers import reducer_of
from distdl_rma.segments.collectives.between_nodes import Messages
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.manager import SegmentManager
from tests.process_group.scripts import SUM, check, drive

import torch  # isort: skip

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.fixture
def way(machine):
    messages = Messages(machine.segments, machine.ranks, "collectives by MPI")
    messages.connect()
    # As if each rank were alone on its node.
    layout = NodeLayout(machine.ranks, tuple((rank,) for rank in machine.ranks), machine.rank)
    yield InterNodeCollectives(machine.segments, messages, layout, "by MPI")
    messages.close()


@pytest.mark.parametrize("turn", [8 << 20, 1 << 14], ids=["at once", "in turns"])
def test_every_script_is_what_it_means(machine, way, monkeypatch, turn):
    monkeypatch.setattr(inter_node, "TURN_BYTES", turn)
    check(machine.segments, way, way, 5000)


@pytest.mark.parametrize("root", [None, 0])
def test_long_vector_takes_no_more_memory_than_a_few_turns(machine, way, monkeypatch, root):
    turn = 1 << 16
    monkeypatch.setattr(inter_node, "TURN_BYTES", turn)
    x = np.ones(1 << 18)
    tracemalloc.start()
    drive(machine.segments, way.reduce(x, reducer_of(SUM, torch.float64, way.size), root), random.Random(0))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12 * turn < x.nbytes
    assert (x == way.size).all() or root not in (None, way.me)


def test_both_sides_of_a_different_call_are_named_also_where_only_what_cannot_be_read_differs(machine, way):
    late = random.Random(0)
    if way.size == 1:
        return
    for text, identity in ((f"call {way.me % 2}", None), ("the same", way.me % 2)):
        way.call = Call(text, identity)
        with pytest.raises(MismatchError, match=f"rank {way.me} calls {text}, but rank . calls ."):
            drive(machine.segments, way.barrier(), late)
    way.call = Call("after it")
    x = np.ones(3, np.uint8)
    drive(machine.segments, way.spread([3] * way.size, x, [None] * way.size, 0), late)


@pytest.fixture(scope="module", params=[2, 3], ids=["pairs", "3+1"])
def manager(request, comm):
    if request.param == comm.size:
        pytest.skip("one node")
    own = comm.Dup()
    manager = SegmentManager(own, None, "64MiB", 15, "auto", node_size=request.param)
    yield manager
    manager.close()
    own.Free()


@pytest.fixture(params=["in order", "interleaved"])
def group(request, manager, comm):
    ranks = list(range(comm.size))
    ranks = ranks if request.param == "in order" else [*ranks[::2], *ranks[1::2]]
    group = RmaProcessGroup(manager, ranks, f"led {request.param}", None)
    assert isinstance(group._collectives, InterNodeCollectives)
    yield group
    group.shutdown()
    comm.Barrier()


@pytest.mark.mpi(min_size=3)
def test_every_script_by_way_of_leaders_is_what_it_means(manager, group, monkeypatch):
    # So that there are several turns.
    monkeypatch.setattr(inter_node, "TURN_BYTES", 1 << 14)
    check(manager, group._collectives, group._collectives, 3000)


OPERATIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16], ids=str)
def test_reductions_are_rounded_once(group, dtype):
    for op in OPERATIONS:
        if op == ReduceOp.AVG and not dtype.is_floating_point:
            continue
        wide = torch.float32 if dtype.is_floating_point else dtype
        rows = [torch.tensor([1.0, 256.0, 3.0, -2.0]).to(dtype) + rank % 3 for rank in range(group.size())]
        every = torch.stack(rows).to(wide)
        expected = {
            ReduceOp.SUM: every.sum(0).to(wide),
            ReduceOp.AVG: every.sum(0) / (len(rows) if dtype.is_floating_point else 1),
            ReduceOp.PRODUCT: every.prod(0).to(wide),
            ReduceOp.MIN: every.amin(0),
            ReduceOp.MAX: every.amax(0),
        }[op].to(dtype)
        mine = rows[group.rank()]
        opts = AllreduceOptions()
        opts.reduceOp = op
        group.allreduce([x := mine.clone()], opts).wait()
        assert torch.equal(x, expected), op
        for root in range(group.size()):
            opts = ReduceOptions()
            opts.reduceOp, opts.rootRank = op, root
            group.reduce([x := mine.clone()], opts).wait()
            assert torch.equal(x, expected if group.rank() == root else mine), (op, root)


@pytest.mark.mpi(min_size=3)
def test_broadcasts_come_from_every_rank(group):
    for root in range(group.size()):
        opts = BroadcastOptions()
        opts.rootRank = root
        group.broadcast([x := torch.full((5,), float(group.rank()))], opts).wait()
        assert x.tolist() == [root] * 5


@pytest.mark.mpi(min_size=3)
def test_all_ranks_have_the_same_bits(group, comm):
    x = torch.rand(1000, generator=torch.Generator().manual_seed(comm.rank)) * 10 ** (comm.rank % 3)
    group.allreduce([x]).wait()
    assert len({each.tobytes() for each in comm.allgather(x.numpy())}) == 1


@pytest.mark.mpi(min_size=3)
def test_each_element_leaves_a_node_once_and_only_leaders_talk(group, monkeypatch):
    sent = Counter()

    def counted(name, bytes_of):
        own = getattr(Messages, name)

        def call(messages, *args):
            sent[name] += bytes_of(*args)
            return own(messages, *args)

        monkeypatch.setattr(Messages, name, call)

    counted("gather_all", lambda mine, out, counts: mine.nbytes)
    counted("exchange", lambda data, counts, out, received: sum(counts))
    counted("broadcast", lambda data, position: data.nbytes)
    count, way = 6000, group._collectives
    leads, nodes = way._across is not None, len(way._teams)
    agreed = 32

    x = torch.ones(count)
    group.allreduce([x]).wait()
    assert sent["exchange"] == leads * x.nbytes
    assert sent["gather_all"] == agreed + leads * x.nbytes // nodes
    sent.clear()
    group.broadcast([x]).wait()
    assert (sent["gather_all"], sent["broadcast"]) == (agreed, leads * x.nbytes)
    sent.clear()
    wholes, mine = torch.empty(group.size() * count), torch.ones(count)
    group.all_gather_single(wholes, mine).wait()
    of_node = len(way._teams[way._team]) * mine.nbytes
    assert sent["gather_all"] == agreed + leads * of_node
    sent.clear()
    group.reduce_scatter_single(mine, wholes).wait()
    assert np.all(mine.numpy() == group.size())
    assert sent["exchange"] == leads * wholes.nbytes

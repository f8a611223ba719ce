"""Collectives between nodes: what they send, what memory they take, and ranks that call something else."""

import random
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from distdl_rma.errors import MismatchError
from distdl_rma.segments.collectives.between_nodes import Messages
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.torch_backend import inter_node
from distdl_rma.torch_backend.calls import Call
from distdl_rma.torch_backend.group import RmaProcessGroup
from distdl_rma.torch_backend.inter_node import InterNodeCollectives
from distdl_rma.torch_backend.tensors import reducer_of

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


@pytest.fixture
def way(machine):
    messages = Messages(machine.segments, machine.ranks, "collectives by MPI")
    messages.connect()
    # As if each rank were alone on its node.
    layout = NodeLayout(machine.ranks, tuple((rank,) for rank in machine.ranks), machine.rank)
    yield InterNodeCollectives(machine.segments, messages, layout, "by MPI")
    messages.close()


def drive(manager, script):
    """Take a script to its end; now and then this rank looks away."""
    deadline, late = time.monotonic() + 30, random.Random(manager.rank)
    for _ in script:
        manager.progress()
        if late.random() < 0.01:
            time.sleep(1e-3)
        if time.monotonic() > deadline:
            raise TimeoutError("a script does not end")


@pytest.mark.parametrize("root", [None, 0])
def test_long_vector_takes_no_more_memory_than_a_few_turns(machine, way, monkeypatch, root):
    turn = 1 << 16
    monkeypatch.setattr(inter_node, "TURN_BYTES", turn)
    x = np.ones(1 << 18)
    tracemalloc.start()
    drive(machine.segments, way.reduce(x, reducer_of(ReduceOp.SUM, torch.float64, way.size), root))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12 * turn < x.nbytes
    assert (x == way.size).all() or root not in (None, way.me)


def test_both_sides_of_a_different_call_are_named_also_where_only_what_cannot_be_read_differs(machine, way):
    if way.size == 1:
        return
    for text, identity in ((f"call {way.me % 2}", None), ("the same", way.me % 2)):
        way.call = Call(text, identity)
        with pytest.raises(MismatchError, match=f"rank {way.me} calls {text}, but rank . calls ."):
            drive(machine.segments, way.compare())
    way.call = Call("after it")
    x = np.ones(3, np.uint8)
    drive(machine.segments, way.compare())
    drive(machine.segments, way.spread([3] * way.size, x, [None] * way.size, 0))


@pytest.mark.mpi(min_size=3)
def test_each_element_leaves_a_node_once_and_only_leaders_talk(segments, comm, monkeypatch):
    group = RmaProcessGroup(segments, segments.ranks, "counted", None)
    way, sent = group._ways, Counter()
    if not isinstance(way, InterNodeCollectives) or way._flat:
        group.shutdown()
        pytest.skip("no node has several ranks, or one has all")

    def counted(name, bytes_of):
        own = getattr(Messages, name)

        def call(messages, *args):
            sent[name] += bytes_of(*args)
            return own(messages, *args)

        monkeypatch.setattr(Messages, name, call)

    counted("gather_all", lambda mine, out, counts: mine.nbytes)
    counted("exchange", lambda data, counts, out, received: sum(counts))
    counted("broadcast", lambda data, position: data.nbytes)
    count, leads, nodes, agreed = 6000, way._across is not None, len(way._teams), 32
    x = torch.ones(count)
    group.allreduce([x]).wait()
    assert sent["exchange"] == leads * x.nbytes
    assert sent["gather_all"] == agreed + leads * x.nbytes // nodes
    sent.clear()
    # Ranks compare a call once, and a result is rounded before it travels to the other nodes.
    group.allreduce_coalesced([x, y := x.bfloat16()]).wait()
    assert sent["exchange"] == leads * 2 * x.nbytes
    assert sent["gather_all"] == agreed + leads * (x.nbytes + y.nbytes) // nodes
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
    group.shutdown()
    comm.Barrier()

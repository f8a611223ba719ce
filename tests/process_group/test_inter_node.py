"""Collectives by MPI."""

import random
import tracemalloc

import numpy as np
import pytest

from distdl_rma.errors import MismatchError
from distdl_rma.process_group import inter_node
from distdl_rma.process_group.inter_node import InterNodeCollectives
from distdl_rma.process_group.node_slots import Call
from distdl_rma.process_group.reducers import reducer_of
from distdl_rma.segments.collectives.between_nodes import Messages
from tests.process_group.scripts import SUM, check, drive

import torch  # isort: skip

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


@pytest.fixture
def way(machine):
    messages = Messages(machine.segments, machine.ranks, "collectives by MPI")
    messages.connect()
    yield InterNodeCollectives(messages, machine.ranks.index(machine.rank), "by MPI")
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

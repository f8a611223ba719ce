"""Collectives by load and store."""

import random

import numpy as np
import pytest
import torch

from distdl_rma.errors import MismatchError
from distdl_rma.process_group.node_slots import WHOLE_BYTES, Call
from distdl_rma.process_group.on_node import NodeCollectives
from distdl_rma.process_group.reducers import reducer_of
from tests.process_group.scripts import SUM, check, drive

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def test_every_script_is_what_it_means(machine, rounds):
    check(machine.segments, rounds, NodeCollectives(rounds), WHOLE_BYTES // 8)
    assert rounds.slot_bytes > WHOLE_BYTES


def test_vectors_that_are_cut_once_are_reduced_again_and_again(machine, rounds):
    way, late = NodeCollectives(rounds), random.Random(machine.rank)
    for count in (WHOLE_BYTES // 8 + 1, rounds.slot_bytes // 8 + 3):
        x = np.zeros(count)
        script = way.shares(x, reducer_of(SUM, torch.float64, way.size))
        rounds.call = Call(f"again {count}")
        for step in range(20):
            x[:] = np.arange(count) % 1000 * (way.me + 1) + step
            drive(machine.segments, script(), late)
            whole = np.arange(count) % 1000 * (way.size * (way.size + 1) // 2) + step * way.size
            assert np.array_equal(x, whole)


@pytest.mark.sizes(2, 3)
def test_who_deals_what_nobody_expects_is_named(machine, rounds, comm):
    if comm.size == 1:
        return
    way = NodeCollectives(rounds)
    sends = [np.zeros(8, np.uint8)] * way.size
    outs = [np.zeros(9 if (way.me, rank) == (0, 1) else 8, np.uint8) for rank in range(way.size)]
    rounds.call = Call("deal")
    with pytest.raises(MismatchError, match="deal: rank 1 has 8 bytes for rank 0, which expects 9"):
        drive(machine.segments, way.deal(sends, outs), random.Random(0))

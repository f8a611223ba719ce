"""What ranks outside of a call receive of it."""

import pytest

from distdl_rma import Machine, PartitionError, ShapeError
from distdl_rma.layers.partitioned.core.refusals import CallOutcome


@pytest.mark.mpi(min_size=2)
def test_those_outside_raise_what_those_inside_refuse(P_world, comm):
    machine, (sender, *outside) = Machine.of(P_world), P_world.ranks
    outcome = CallOutcome.among(machine, [sender], P_world.ranks, "it")
    outcome.connect()
    for error in (
        None,
        ShapeError("'it': two\n  lines"),
        None,
        PartitionError("no grid"),
        ShapeError("aé" * 999),
    ):
        if machine.rank not in outside:
            outcome.send(error)
        elif error is None:
            outcome.receive()
        else:
            with pytest.raises(type(error)) as caught:
                outcome.receive()
            # A long text ends between two letters.
            assert str(caught.value) and str(error).startswith(str(caught.value))
            assert str(caught.value) == str(error) or len(str(caught.value).encode()) > 1000


@pytest.mark.mpi(min_size=4)
def test_other_nodes_receive_an_outcome_once_and_pass_it_on(P_world, comm, monkeypatch):
    machine, ranks = Machine.of(P_world), P_world.ranks
    monkeypatch.setattr(machine.segments.segment, "nodes", (ranks[:2], ranks[2:]))
    outcome = CallOutcome.among(machine, ranks[:1], ranks, "it")
    outcome.connect()
    puts = machine.segments.counters.puts
    for words in ("no", "grid"):
        outcome.send(ShapeError(words))
        if comm.rank:
            with pytest.raises(ShapeError, match=words):
                outcome.receive()
    # To the other rank of this node, and to one of the other node, which passes it on to its own.
    assert machine.segments.counters.puts - puts == 2 * [2, 0, 1, 0][comm.rank]


@pytest.mark.mpi(min_size=4)
def test_who_neither_sends_nor_receives_has_no_outcome(P_world):
    machine, ranks = Machine.of(P_world), P_world.ranks
    # All take part; only the first rank inside sends; and copies are for a layer of other ranks.
    half = ranks[:2] if machine.rank in ranks[:2] else ranks[2:]
    for inside, without in ((ranks, ranks), (ranks[:2], ranks[1:2]), (half, ranks)):
        assert (CallOutcome.among(machine, inside, ranks, "it") is None) == (machine.rank in without)

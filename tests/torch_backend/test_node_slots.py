"""Rounds: who is how far, what ranks call in them, and when memory is free again."""

import time

import pytest

from distdl_rma.errors import MismatchError
from distdl_rma.torch_backend.calls import Call

on_ranks = pytest.mark.mpi(min_size=2)


def one_round(rounds, call):
    rounds.call = call
    while not rounds.opened():
        time.sleep(1e-4)
    rounds.announce(rounds.number, True)
    while not rounds.seen(rounds.number):
        time.sleep(1e-4)
    rounds.read(rounds.number)


@on_ranks
def test_a_kind_of_call_is_compared_whole_when_it_is_new_and_has_a_number_from_then_on(rounds):
    for step in range(40):
        one_round(rounds, Call(f"call {step % 5}"))
        assert rounds._kind == (0 if step < 5 else 1 + step % 5)
    # As the first words of many tensors read, of which the last ones differ.
    with pytest.raises(
        MismatchError, match=f"rank {rounds.me} calls many tensors, but rank . calls many ten"
    ):
        one_round(rounds, Call("many tensors", rounds.me))


@on_ranks
def test_a_new_kind_on_one_rank_is_not_a_known_one_of_another(rounds):
    one_round(rounds, Call("known"))
    mine, theirs = ("known", "new") if rounds.me == 0 else ("new", "known")
    with pytest.raises(MismatchError, match=f"rank {rounds.me} calls {mine}, but rank . calls {theirs}"):
        one_round(rounds, Call(mine))


@on_ranks
def test_who_is_late_is_who_the_round_waits_for(rounds, comm):
    one_round(rounds, Call("together"))
    if rounds.me == 0:
        rounds.call = Call("alone")
        assert rounds.opened()
        rounds.announce(rounds.number, True)
        assert not rounds.seen(rounds.number)
        assert rounds.waiting().ranks == rounds.ranks[1:]
        assert "in alone of group 'some rounds'" in str(rounds.waiting())
    comm.Barrier()


@on_ranks
def test_memory_is_ones_own_when_all_the_others_have_left(rounds, comm):
    assert not rounds.left()
    comm.Barrier()
    if rounds.me:
        rounds.leave()
    comm.Barrier()
    assert rounds.left() == (rounds.me == 0)
    comm.Barrier()
    if rounds.me == 0:
        rounds.leave()
    comm.Barrier()
    assert rounds.left()

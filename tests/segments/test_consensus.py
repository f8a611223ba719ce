"""What ranks say to each other beside their data: alike or not, in words, and at which place."""

import random
import time

import pytest

from distdl_rma import ExchangeTimeout, Machine, MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.consensus import Consensus, gather_words

pytestmark = pytest.mark.mpi


def test_all_hear_what_every_rank_says(comm):
    ranks = list(reversed(range(comm.size)))
    with Machine(comm, ranks=ranks, segment_size="1MiB") as machine:
        said = gather_words(machine.segments, {"x": "y" * (comm.rank % 2) * 1000}, "words")
        assert list(said.items()) == [(rank, {"x": "y" * (rank % 2) * 1000}) for rank in ranks]
        for again in range(3):
            same = gather_words(machine.segments, ["same", None], f"again {again}")
            assert list(same.items()) == [(rank, ["same", None]) for rank in ranks]


def test_texts_of_any_length_come_to_all(segments, comm):
    consensus = Consensus(segments, segments.ranks)
    for longest in (0, 1, 507, 508, 509, 2000):
        texts = [bytes([rank]) * max(0, longest - rank) for rank in range(comm.size)]
        assert consensus.gather("texts", texts[comm.rank]) == texts


def test_ranks_in_an_order_have_one_consensus(segments, comm):
    assert Consensus.of(segments, segments.ranks) is Consensus.of(segments, segments.ranks)
    part = segments.ranks[:2] if comm.rank < 2 else segments.ranks[2:]
    assert gather_words(segments, comm.rank, "part", part) == {rank: rank for rank in part}


@pytest.mark.mpi(min_size=2)
def test_ranks_at_different_places_learn_it_and_go_on(segments, comm):
    consensus, last = Consensus(segments, segments.ranks), comm.size - 1
    for title in ("enc2", "enc1" * 100):
        mine = title if comm.rank == last else "enc1" * 100
        consensus.start(mine, 1, 2, 3)
        if title == "enc2":
            with pytest.raises(MismatchError, match=f"rank 0 is in 'enc1.*' but rank {last} in 'enc2'"):
                consensus.wait()
    assert consensus.wait()


@pytest.mark.mpi(min_size=2)
@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("same", [True, False], ids=["alike", "in words"])
@pytest.mark.parametrize("long", [False, True], ids=["one pass", "passes"])
def test_a_call_that_is_repeated_after_a_timeout_is_one_call(segments, comm, same, long):
    name = f"repeated {same} {long}"
    words = ["x" * (5000 if long else 1), 0 if same else comm.rank]
    expected = {rank: [words[0], 0 if same else rank] for rank in segments.ranks}
    consensus = Consensus.of(segments, segments.ranks)
    consensus.connect()
    gather_words(segments, comm.rank, "words of all")
    for turn in range(6):
        rng = random.Random(turn)
        late, timeout = rng.randrange(comm.size), segments.waiter.timeout
        if comm.rank == late:
            time.sleep(0.1)
        else:
            segments.waiter.timeout = 0.005 * (1 + rng.randrange(3))
        try:
            while True:
                try:
                    said = gather_words(segments, words, name)
                    break
                except ExchangeTimeout:
                    pass
        finally:
            segments.waiter.timeout = timeout
        assert said == expected
        assert gather_words(segments, turn, f"{name}, turn {turn}") == dict.fromkeys(segments.ranks, turn)


@pytest.mark.mpi(min_size=2)
def test_texts_that_were_given_up_after_a_timeout_are_not_those_of_the_next_call(segments, comm, monkeypatch):
    consensus, text = Consensus(segments, segments.ranks), bytes([comm.rank]) * 1200
    consensus.gather("first of all", bytes([comm.rank]))
    consensus.start("given up", len(text), fingerprint(text), 0)
    assert not consensus.wait()
    comm.Barrier()
    if comm.rank == 0:
        monkeypatch.setattr(segments.waiter, "timeout", 0.01)
        with pytest.raises(ExchangeTimeout):
            consensus.rows(text, len(text))
        monkeypatch.undo()
    comm.Barrier()
    if comm.rank != 0:
        assert consensus.rows(text, len(text)) == [bytes([rank]) * 1200 for rank in range(comm.size)]
    said = consensus.gather("next", bytes([comm.rank + 100]))
    assert said == [bytes([rank + 100]) for rank in range(comm.size)]


@pytest.mark.mpi(min_size=2)
def test_a_first_comparison_that_times_out_says_which_one_it_was(segments, comm, monkeypatch):
    consensus = Consensus(segments, segments.ranks)
    if comm.rank == 0:
        monkeypatch.setattr(segments.waiter, "timeout", 0.01)
        with pytest.raises(ExchangeTimeout, match=r"^'a call of rank 0': rank 0 waited .* to connect"):
            consensus.gather("a call of rank 0", b"")
        monkeypatch.undo()
    comm.Barrier()
    assert consensus.gather("a call of all", b"") == [b""] * comm.size

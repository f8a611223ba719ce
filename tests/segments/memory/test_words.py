"""Integers of a peer's buffer that ranks and threads change at the same time."""

import random
import threading

import numpy as np
import pytest

from distdl_rma import ArgumentError, ExchangeTimeout, ShapeError

pytestmark = pytest.mark.mpi


def test_a_counter_that_all_ranks_hammer_counts_exactly(meet, comm):
    _, remotes = meet(16)
    rounds = 150
    before = [remotes[0].fetch_add(8, 1) for _ in range(rounds)]
    # Nobody saw a value twice, and each rank saw them grow.
    assert before == sorted(before)
    everyone = [value for values in comm.allgather(before) for value in values]
    assert sorted(everyone) == list(range(rounds * comm.size))
    assert remotes[0].fetch_add(8, 0) == rounds * comm.size and remotes[0].fetch_add(0, 0) == 0


def test_counters_on_all_ranks_take_sums_of_any_sign(meet, comm):
    _, remotes = meet(8)
    chance = random.Random(comm.rank)
    sums = dict.fromkeys(remotes, 0)
    for _ in range(100):
        peer, value = chance.randrange(comm.size), chance.randrange(-(2**40), 2**40)
        remotes[peer].fetch_add(0, value)
        sums[peer] += value
    everyones = comm.allgather(sums)
    for peer, remote in remotes.items():
        assert remote.fetch_add(0, 0) == sum(theirs[peer] for theirs in everyones)
    comm.Barrier()


def test_a_lock_of_compare_swap_protects_what_is_not_atomic(meet, comm):
    _, remotes = meet(16)
    owner = remotes[comm.size - 1]
    lock, counter, rounds = 0, 8, 15
    value = np.zeros(1, np.int64)
    for _ in range(rounds):
        while owner.compare_swap(lock, 0, comm.rank + 1):
            pass
        owner.get(value, counter)
        value += 1
        owner.put(value, counter)
        owner.flush()
        assert owner.compare_swap(lock, comm.rank + 1, 0) == comm.rank + 1
    comm.Barrier()
    owner.get(value, counter)
    assert value[0] == rounds * comm.size
    comm.Barrier()


def test_compare_swap_returns_what_was_there_and_sets_only_what_was_expected(meet, comm):
    me = meet(8)[1][comm.rank]
    assert me.compare_swap(0, 1, 5) == 0
    assert me.compare_swap(0, 0, 5) == 0
    assert me.compare_swap(0, 5, -(2**63)) == 5
    assert me.compare_swap(0, -(2**63), 2**63 - 1) == -(2**63)
    assert me.fetch_add(0, 1) == 2**63 - 1
    assert me.fetch_add(0, 0) == -(2**63)


def test_loads_stores_and_swaps_see_whole_words_and_lose_none(meet, comm):
    _, remotes = meet(24)
    owner, last, count, stored = remotes[comm.size - 1], 0, 8, 16
    mine, taken = [(comm.rank + 1) << 32 | i + 1 for i in range(60)], []
    for value in mine:
        # Who swaps a value in takes the one before out: each is taken once, the last one stays.
        taken.append(owner.atomic_swap(last, value))
        owner.fetch_add(count, 1)
        owner.atomic_store(stored, value)
        seen = owner.atomic_load(stored)
        assert 1 <= seen >> 32 <= comm.size and 1 <= seen & 0xFFFFFFFF <= len(mine)
    comm.Barrier()
    assert owner.atomic_load(count) == comm.size * len(mine)
    everyones = [value for values in comm.allgather(mine) for value in values]
    out = [value for values in comm.allgather(taken) for value in values]
    assert sorted([*out, owner.atomic_load(last)]) == sorted([0, *everyones])
    comm.Barrier()


def test_a_store_is_there_on_return_and_any_word_can_be_stored(meet, comm):
    _, remotes = meet(8 * comm.size)
    for value in (5, -(2**63), 2**63 - 1, 0):
        for remote in remotes.values():
            remote.atomic_store(8 * comm.rank, value)
            assert remote.atomic_load(8 * comm.rank) == value
            assert remote.atomic_swap(8 * comm.rank, 7) == value
            assert remote.compare_swap(8 * comm.rank, 7, 8) == 7 and remote.fetch_add(8 * comm.rank, 1) == 8
    for call in (remotes[0].atomic_store, remotes[0].atomic_swap):
        with pytest.raises(ArgumentError, match="integers of 64 bits"):
            call(0, 2**63)
    with pytest.raises(ShapeError, match="8 bytes at a multiple of 8 inside rank"):
        remotes[0].atomic_load(4)
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_an_atomic_that_is_not_answered_names_the_peer_and_changes_nothing(meet, machine, comm, monkeypatch):
    peer = (comm.rank + 1) % comm.size
    remote = meet(8)[1][peer]
    with monkeypatch.context() as patch:
        patch.setattr(machine.segments.segment.atomics, "responding", lambda rank: lambda: False)
        for call in (
            lambda: remote.atomic_load(0, timeout=0),
            lambda: remote.atomic_store(0, 1, timeout=0),
            lambda: remote.atomic_swap(0, 1, timeout=0),
        ):
            with pytest.raises(ExchangeTimeout, match=rf"for rank {peer} to answer before an atomic"):
                call()
    assert remote.atomic_load(0) == 0
    comm.Barrier()


def test_threads_of_a_rank_change_words_at_the_same_time(meet, comm):
    buffer, remotes = meet(64)
    peer, found, each = (comm.rank + 1) % comm.size, [], 40

    def add(number):
        # A word of its own, and one of all.
        for _ in range(each):
            remotes[peer].fetch_add(8 + 8 * number, 1)
            found.append(remotes[peer].fetch_add(0, 3))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Nobody else adds to these words of the peer: each sum is found once.
    assert sorted(found) == list(range(0, 3 * 4 * each, 3))
    comm.Barrier()
    assert [buffer.here.atomic_load(8 * at) for at in range(5)] == [3 * 4 * each, *[each] * 4]
    comm.Barrier()


def test_words_and_offsets_are_integers_of_any_kind(meet, comm):
    me = meet(512)[1][comm.rank]
    assert me.fetch_add(np.uint8(248), np.uint8(200)) == 0
    assert me.fetch_add(np.int32(248), np.int16(-5)) == 200
    assert me.compare_swap(248, np.uint64(195), True) == 195
    assert me.fetch_add(248, 0) == 1
    for call in (
        lambda: me.fetch_add(0, 1.5),
        lambda: me.fetch_add(0.0, 1),
        lambda: me.compare_swap(0, 0, None),
    ):
        with pytest.raises((TypeError, ArgumentError), match=r"integer|whole number"):
            call()
    for value in (2**63, -(2**63) - 1, np.uint64(2**63)):
        with pytest.raises(ArgumentError, match="integers of 64 bits"):
            me.fetch_add(0, value)
        with pytest.raises(ArgumentError, match="integers of 64 bits"):
            me.compare_swap(0, 0, value)
    assert me.fetch_add(0, 0) == 0


@pytest.mark.parametrize("offset", [-8, 4, 7, 512, 505, 2**70])
def test_a_word_is_8_aligned_bytes_inside_the_buffer(meet, comm, offset):
    me = meet(512)[1][comm.rank]
    with pytest.raises(ShapeError, match="8 bytes at a multiple of 8 inside rank"):
        me.fetch_add(offset, 1)
    with pytest.raises(ShapeError, match="8 bytes at a multiple of 8 inside rank"):
        me.compare_swap(offset, 0, 1)

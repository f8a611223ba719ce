"""Integers of a peer's buffer that ranks and threads change at the same time."""

import threading
from itertools import chain

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout

pytestmark = pytest.mark.mpi


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


def test_words_that_all_ranks_hammer_are_whole_and_lose_none(meet, comm):
    _, remotes = meet(32)
    owner, last, count, stored, unused = remotes[comm.size - 1], 0, 8, 16, 24
    mine, taken, before = [(comm.rank + 1) << 32 | i + 1 for i in range(100)], [], []
    for value in mine:
        # Who swaps a value in takes the one before out: each is taken once, the last one stays.
        taken.append(owner.atomic_swap(last, value))
        before.append(owner.fetch_add(count, 1))
        owner.atomic_store(stored, value)
        seen = owner.atomic_load(stored)
        assert 1 <= seen >> 32 <= comm.size and 1 <= seen & 0xFFFFFFFF <= len(mine)
    comm.Barrier()
    everyones, out, counted = ([*chain(*comm.allgather(values))] for values in (mine, taken, before))
    # Nobody saw a number twice, and each rank saw them grow.
    assert before == sorted(before) and sorted(counted) == list(range(comm.size * len(mine)))
    assert owner.atomic_load(count) == owner.fetch_add(count, 0) == len(counted)
    assert sorted([*out, owner.atomic_load(last)]) == sorted([0, *everyones])
    assert owner.atomic_load(unused) == 0
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


@pytest.mark.processes
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

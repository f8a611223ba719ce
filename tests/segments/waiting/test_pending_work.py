"""A rank that waits in one machine goes on with what is under way in the others."""

import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from distdl_rma.errors import ExchangeTimeout, MismatchError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.waiting.pending_work import PendingWork


@pytest.fixture(scope="module")
def pair(comm):
    """Two segment managers that reach all peers by MPI, where nobody else moves data."""
    from distdl_rma.segments import SegmentManager

    own = comm.Dup()
    two = [SegmentManager(own, None, "8MiB", 15, "remote", "none") for _ in range(2)]
    yield two
    for manager in two:
        manager.close()
    own.Free()


def letters(manager, size=8):
    others = {rank: () for rank in manager.ranks if rank != manager.rank}
    buffer = manager.get_segment_buffer(size, 2, "letters")
    return buffer, buffer.exchange(others, "letters")


@pytest.mark.mpi(min_size=2)
def test_wait_in_one_machine_moves_what_was_put_in_another(pair, comm):
    big = 2 << 20
    first, first_peers = letters(pair[0], big)
    second, second_peers = letters(pair[1])
    for step in range(3):
        if comm.rank == 0:
            first_peers[1].put_notify(np.full(big, step, np.uint8), index=0)
            second.notify_wait(0)
        elif comm.rank == 1:
            first.notify_wait(0)
            assert (first.array == step).all()
            second_peers[0].notify(0)
    comm.Barrier()
    first.free()
    second.free()


@pytest.mark.mpi(min_size=2)
def test_rank_that_waits_for_others_to_make_a_machine_moves_what_was_put_in_another(pair, comm):
    from distdl_rma import Machine

    big = 2 << 20
    first, first_peers = letters(pair[0], big)
    if comm.rank == 0:
        first_peers[1].put_notify(np.full(big, 7, np.uint8), index=0)
    elif comm.rank == 1:
        first.notify_wait(0)
        assert (first.array == 7).all()
    Machine(comm, segment_size="8MiB", timeout=15).close()
    first.free()


@pytest.mark.mpi(min_size=2)
def test_error_in_a_step_of_one_machine_is_raised_there_and_not_in_a_wait_of_another(pair, comm):
    def broken():
        pair[0].withdraw(broken)
        raise MismatchError("the step went wrong")

    second, _ = letters(pair[1])
    if comm.rank == 0:
        pair[0].defer(broken)
        with pytest.raises(ExchangeTimeout, match=r"waited 0\.3 s"):
            second.notify_wait(0, timeout=0.3)
        with pytest.raises(MismatchError, match="the step went wrong"):
            pair[0].progress()
        pair[0].progress()
    comm.Barrier()
    second.free()


@pytest.mark.mpi
def test_interrupt_in_a_step_of_one_machine_ends_the_wait_in_another(pair, comm):
    # What a signal handler raises is for the thread that waits, wherever it was at that moment.
    def interrupted():
        pair[0].withdraw(interrupted)
        raise KeyboardInterrupt

    buffer = pair[1].get_segment_buffer(0, 1, "nobody's")
    pair[0].defer(interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.notify_wait(0, timeout=5)
    pair[0].progress()
    buffer.free()
    comm.Barrier()


def test_machine_that_failed_takes_no_steps_and_ends_no_wait_in_another():
    class Notices:
        failures: ClassVar[dict[int, str]] = {}

        def poll(self):
            self.failures[1] = "disk on fire"

    def advance():
        taken.append(1)
        return False

    taken = []
    segment = SimpleNamespace(lock=threading.RLock(), progress=lambda: True, crowded=False)
    silent = SimpleNamespace(poll=lambda: None, failures={})
    one, another = PendingWork(segment, Notices(), Counters()), PendingWork(segment, silent, Counters())
    one.begin("none")
    another.begin("none")
    one.defer(advance)
    try:
        # The first turn takes in the notice and the step, the second one neither.
        another.advance()
        another.advance()
        assert taken == [1]
        one.advance()
        assert taken == [1, 1]
    finally:
        one.end()
        another.end()


@pytest.mark.mpi
def test_manager_that_is_closed_or_dropped_is_none_of_the_process_any_more(comm):
    from distdl_rma.segments import SegmentManager
    from distdl_rma.segments.waiting import open_machines

    before = open_machines._open
    manager = SegmentManager(comm, None, "8MiB", 15)
    assert len(open_machines._open) == len(before) + 1
    manager.close()
    assert open_machines._open == before

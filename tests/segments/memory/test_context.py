"""Contexts and their queues: what exists once, flushes, and when the memory at this end may be used again."""

import copy
import gc
import os
import select
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from distdl_rma import ClosedError, ExchangeTimeout, Machine, UnsupportedError
from distdl_rma.segments.memory.context import Queue, SegmentContext
from distdl_rma.trace import Counters


@pytest.mark.mpi
def test_a_machine_and_its_groups_are_shared_by_copies(P_world):
    machine = Machine.of(P_world)
    assert copy.deepcopy(machine) is copy.copy(machine) is machine
    assert copy.deepcopy(P_world) == P_world
    assert copy.deepcopy(P_world).home is machine
    group = machine.group(name="mine")
    assert copy.deepcopy([group])[0] is group
    group.close()


def outcome_in_a_fork(call):
    """Error of a call in a child of this process, as text; "hangs" if it does not return."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = f"returned {call()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    answers = select.select([reader], [], [], 30)[0]
    text = os.read(reader, 1000).decode() if answers else "hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return text


CALLS_IN_A_FORK = {
    "put": lambda m, buffer, remote: remote.put(np.ones(1)),
    "put_notify": lambda m, buffer, remote: remote.put_notify(np.ones(1), 0),
    "get": lambda m, buffer, remote: remote.get(np.ones(1)),
    "atomic": lambda m, buffer, remote: remote.fetch_add(0, 1),
    "flush": lambda m, buffer, remote: remote.flush(),
    "wait": lambda m, buffer, remote: buffer.notify_wait(0),
    "test": lambda m, buffer, remote: buffer.notify_test(),
    "array": lambda m, buffer, remote: buffer.array,
    "barrier": lambda m, buffer, remote: m.group().barrier(),
    "collective": lambda m, buffer, remote: m.group().allreduce(3),
    "progress": lambda m, buffer, remote: m.segments.progress(),
    "partition": lambda m, buffer, remote: Machine.of(m.partition()),
    "another machine": lambda m, buffer, remote: Machine(segment_size="1MiB", timeout=1),
}


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("what", CALLS_IN_A_FORK)
def test_a_forked_process_is_refused_whatever_it_calls_and_the_rank_goes_on(around, comm, what):
    machine, buffer, remote = around
    said = outcome_in_a_fork(lambda: CALLS_IN_A_FORK[what](machine, buffer, remote))
    assert said.startswith("ProtocolError: ") and "this process is a fork of a rank" in said
    remote.put_notify(np.full(3, 7.0), 1)
    assert buffer.notify_wait(1) == 1 and buffer.view(np.float64, (3,)).tolist() == [7.0] * 3


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.sizes(1)
def test_a_fork_can_drop_what_the_rank_has_whichever_thread_had_the_lock(around):
    machine, buffer, _ = around
    held, over = threading.Event(), threading.Event()

    def hold():
        with machine.segments.segment.lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    said = outcome_in_a_fork(lambda: (buffer.free(), machine.close(), machine.closed))
    over.set()
    thread.join()
    assert said == "returned (None, None, True)" and not machine.closed


@pytest.mark.mpi
def test_what_lies_in_the_segment_is_not_copied(P_world):
    with pytest.raises(UnsupportedError, match="what lies in the segment neither"):
        copy.deepcopy(Machine.of(P_world).segments.get_segment_buffer(8))


class Link:
    """Has so many things left to deliver once it was closed."""

    def __init__(self, left):
        self.left, self.closed = left, 0

    def close_delivery(self):
        self.closed += 1

    def advance(self):
        self.left = max(0, self.left - 1)
        return not self.left


def context(links, until, rank=1, ranks=(4, 7, 9)):
    segment = SimpleNamespace(nbytes=1 << 12, link=links.__getitem__, lock=threading.RLock())
    waiter = SimpleNamespace(until=until, counters=Counters())
    return SegmentContext(SimpleNamespace(rank=rank), ranks, segment, waiter)


def test_a_flush_closes_all_deliveries_before_it_waits_for_any_and_names_those_that_are_late():
    links = {4: Link(2), 7: Link(0), 9: Link(3)}
    seen = []

    def until(ready, reason, timeout):
        assert all(link.closed == 1 for link in links.values()) and timeout == 5
        while not ready():
            seen.append(reason().ranks)

    one = context(links, until)
    one.flush((4, 7, 9), 5)
    assert seen[0] == (9,) and one.rank == 7
    assert not any(link.left for link in links.values())


def test_numbers_of_notifications_begin_far_from_each_other():
    one, another = (context({}, None) for _ in range(2))
    assert next(one.sequence) == next(another.sequence)
    other = context({}, None, rank=0, ranks=(5,))
    assert abs(next(other.sequence) - next(one.sequence)) > 1000


@pytest.mark.mpi
def test_a_wait_that_timed_out_can_be_resumed(machine):
    queue, finished, complete = Queue(machine.segments, "slow"), [], []

    class Request:
        def Test(self):  # noqa: N802
            return bool(complete)

    queue.post(machine.rank, Request(), None, lambda: finished.append(1))
    with pytest.raises(ExchangeTimeout, match=r"to take 1 operation\(s\) of queue 'slow'"):
        queue.wait(timeout=0)
    assert not finished and len(queue) == 1
    complete.append(1)
    queue.wait(timeout=5)
    assert finished == [1] and len(queue) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_looking_at_a_queue_is_enough_for_it_to_be_done(comm, transport):
    with Machine(comm, segment_size="8MiB", transport=transport, progress="none", timeout=15) as machine:
        buffer = machine.segments.get_segment_buffer(4 << 20, 1)
        after = buffer.exchange(dict.fromkeys(range(comm.size), ()), "all")[(comm.rank + 1) % comm.size]
        queue, data = machine.segments.queue(), np.ones(4 << 20, np.uint8)
        # A notification is on its way, which a flush goes before.
        after.put_notify(data[:8], 0)
        buffer.notify_test(0, 1)
        after.put(data, queue=queue)
        everyone = None
        deadline = time.monotonic() + 60
        while everyone is None or not everyone.Test():
            # Then on until all ranks are done: they need each other.
            if queue.test() and everyone is None:
                everyone = comm.Ibarrier()
            assert time.monotonic() < deadline


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("transport", ["auto", "remote"])
@pytest.mark.parametrize("progress", ["none", "thread"])
def test_a_machine_closes_with_operations_in_flight_and_queues_forgotten(comm, transport, progress):
    for _ in range(3):
        machine = Machine(comm, segment_size="8MiB", transport=transport, progress=progress, timeout=15)
        buffer = machine.segments.get_segment_buffer(4 << 20, 1)
        remotes = buffer.exchange(dict.fromkeys(range(comm.size), ()), "all")
        queue = machine.segments.queue()
        for remote in remotes.values():
            remote.put(np.ones(1 << 20, np.uint8), queue=queue)
            remote.get(np.empty(1 << 20, np.uint8), 1 << 20, machine.segments.queue("forgotten"))
            places = range(2 << 20, 3 << 20, 2 << 10)
            remote.put_list([(np.ones(1 << 10, np.uint8), at) for at in places])
        remotes[(comm.rank + 1) % comm.size].notify(0)
        gc.collect()
        machine.close()
        with pytest.raises(ClosedError, match="already closed"):
            queue.wait()


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_a_get_that_was_given_up_leaves_its_array_alone(comm):
    with Machine(comm, segment_size="8MiB", transport="remote", progress="none", timeout=15) as machine:
        buffer = machine.segments.get_segment_buffer(4 << 20, 1)
        buffer.array[:] = 5
        remotes = buffer.exchange(dict.fromkeys(range(comm.size), ()), "all")
        remote = remotes[(comm.rank + 1) % comm.size]
        comm.Barrier()
        for _ in range(8):
            out = np.zeros(4 << 20, np.uint8)
            try:
                remote.get(out, timeout=0)
            except ExchangeTimeout:
                # Now it may be used for anything: the answer that is still to come does not change it.
                out[:] = 7
                for _ in range(50):
                    machine.segments.progress()
                assert (out == 7).all()
            remote.get(out)
            assert (out == 5).all()
        comm.Barrier()

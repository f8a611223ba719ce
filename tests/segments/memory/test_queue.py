"""Queues: when the memory at this end may be used again."""

import gc
import time

import numpy as np
import pytest

from distdl_rma import ClosedError, ExchangeTimeout, Machine
from distdl_rma.segments.memory.context import Queue

pytestmark = pytest.mark.mpi

WORDS = 20_000


def test_a_wait_that_timed_out_can_be_resumed(machine):
    queue, finished, complete = Queue(machine.segments, "slow"), [], []

    class Request:
        def Test(self):  # noqa: N802
            return bool(complete)

    queue.post(machine.rank, [Request()], None, lambda: finished.append(1))
    with pytest.raises(ExchangeTimeout, match=r"to take 1 operation\(s\) of queue 'slow'"):
        queue.wait(timeout=0)
    assert not finished and len(queue) == 1
    complete.append(1)
    queue.wait(timeout=5)
    assert finished == [1] and len(queue) == 0


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
            remote.view(np.uint8, (1 << 10, 1 << 10), 2 << 20)[::2] = 1
        remotes[(comm.rank + 1) % comm.size].notify(0)
        gc.collect()
        machine.close()
        with pytest.raises(ClosedError, match="already closed"):
            queue.wait()


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

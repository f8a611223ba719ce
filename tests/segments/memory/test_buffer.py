"""Buffers, puts and notifications between ranks."""

import random
import time

import numpy as np
import pytest

from distdl_rma import (
    ArgumentError,
    ClosedError,
    ExchangeTimeout,
    SegmentError,
    ShapeError,
)

pytestmark = pytest.mark.mpi


def test_buffer_has_address_offset_size_and_view(machine):
    buffer = machine.segments.get_segment_buffer(1000)
    assert buffer.nbytes == 1000 and buffer.array.shape == (1000,) and buffer.array.dtype == np.uint8
    assert buffer.address == buffer.array.ctypes.data and buffer.address % 64 == 0
    buffer.view(np.float64, (5, 3), 40)[:] = 7.0
    assert (buffer.array[40:160].view(np.float64) == 7.0).all()
    buffer.free()


def test_size_zero_is_legal(machine):
    with_words = machine.segments.get_segment_buffer(0, notifications=2)
    assert with_words.array.size == 0 and with_words.notification(1) == 0
    with_words.free()


@pytest.mark.parametrize("size", [-1, 1.5, "8", None, True])
def test_size_that_is_no_number_of_bytes_is_refused(machine, size):
    with pytest.raises(ArgumentError, match="bytes"):
        machine.segments.get_segment_buffer(size)


def test_exhausted_segment_says_asked_free_largest_and_what_to_set(machine):
    with pytest.raises(SegmentError, match=r"asked for \d+ bytes, .* free, largest block .*SEGMENT_SIZE"):
        machine.segments.get_segment_buffer(1 << 40)


def test_freed_buffer_is_closed_and_its_memory_used_again(machine):
    # What others gave back is freed with the next allocation.
    machine.segments.get_segment_buffer(0).free()
    before = machine.segments.heap.used
    buffer = machine.segments.get_segment_buffer(100_000)
    buffer.free()
    buffer.free()
    assert machine.segments.heap.used <= before
    again = machine.segments.get_segment_buffer(100_000)
    assert again.offset == buffer.offset
    again.free()
    with pytest.raises(ClosedError, match="already freed"):
        buffer.notification(0)


def test_notified_puts_go_round_a_ring_with_random_delays(machine, comm):
    delays = random.Random(comm.rank)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # Two slots, each with a notification that it is full, and one that it is empty.
    buffer = machine.segments.get_segment_buffer(2 * 800, notifications=4)
    remotes = buffer.exchange(dict.fromkeys({after, before}, ()), "ring")
    for epoch in range(1, 200):
        slot = epoch % 2
        if delays.random() < 0.05:
            time.sleep(delays.random() * 2e-3)
        data = np.arange(100) + 1000 * comm.rank + epoch
        if epoch > 2:
            assert buffer.notify_wait(2 + slot) == epoch - 2
        remotes[after].put_notify(data, slot, epoch, offset=slot * 800)
        data[:] = -1
        assert buffer.notify_wait(slot) == epoch
        assert (buffer.view(np.int64, (100,), slot * 800) == np.arange(100) + 1000 * before + epoch).all()
        remotes[before].notify(2 + slot, epoch)
    for remote in remotes.values():
        remote.flush()
    comm.Barrier()
    buffer.free()


def test_put_outside_of_the_peers_buffer_is_refused_before_data_moves(machine, comm):
    buffer = machine.segments.get_segment_buffer(64, notifications=1)
    remote = buffer.exchange({comm.rank: ()}, "self")[comm.rank]
    with pytest.raises(ShapeError, match="not inside rank"):
        remote.put(np.zeros(9), 0)
    with pytest.raises(ShapeError, match="not inside rank"):
        remote.put(np.zeros(1), -8)
    with pytest.raises(ArgumentError, match="notification 1 of a buffer that has 1"):
        remote.notify(1, 1)
    with pytest.raises(ShapeError, match="tensor or bytes, got list"):
        remote.put([1, 2, 3])
    buffer.free()


def test_wait_that_times_out_can_be_repeated(machine, comm):
    buffer = machine.segments.get_segment_buffer(8, notifications=1)
    remote = buffer.exchange({comm.rank: ()}, "self")[comm.rank]
    with pytest.raises(ExchangeTimeout, match=f"waited 0.01 s for rank {comm.rank} to set"):
        buffer.notify_wait(0, timeout=0.01)
    remote.put_notify(np.array([3.0]), 0, 5)
    assert buffer.notify_wait(0, timeout=5) == 5
    assert buffer.view(np.float64, (1,))[0] == 3.0
    buffer.free()

"""A peer's buffer: which bytes are meant, near and far; puts, gets and notifications."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distdl_rma import ArgumentError, ClosedError, ExchangeTimeout, ShapeError
from distdl_rma.segments.memory.remote_buffer import RemoteMemory
from distdl_rma.segments.transport.links import SharedLink
from distdl_rma.trace import Counters


class FarLink(SharedLink):
    """Carries at once, but does not let its memory be seen."""

    def __init__(self, memory, fence):
        super().__init__(memory, fence)
        self.memory = None


@pytest.fixture(params=[SharedLink, FarLink])
def block(request):
    """64 bytes from 128 on in the segment of rank 3, and that segment."""
    segment = np.arange(256).astype(np.uint8)
    link = request.param(segment, lambda: None)
    context = SimpleNamespace(
        counters=Counters(),
        closed=False,
        check_open=lambda: None,
        segment=SimpleNamespace(link=lambda rank: link, lock=threading.RLock()),
        waiter=SimpleNamespace(until=lambda ready, reason, timeout: ready()),
    )
    return RemoteMemory(context, 3, 128, 64), segment


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (64, 1), (0, 65), (60, 5), (2**70, 0)])
def test_nothing_outside_is_inside(block, offset, nbytes):
    with pytest.raises(
        ShapeError, match=f"{nbytes} bytes at offset {offset} are not inside rank 3's buffer of 64"
    ):
        block[0].inside(offset, nbytes, "get")
    assert block[0].inside(np.uint8(60), 4, "get") == 60
    with pytest.raises(ArgumentError, match="get: an offset is a whole number"):
        block[0].inside(0.5, 4, "get")


def test_what_follows_a_get_comes_when_the_target_is_filled(block):
    memory, _ = block
    target, seen = np.zeros(2, np.uint8), []
    memory.get_then(memory.fetch(target, 0), lambda: seen.append(target.tolist()))
    memory.get_then(memory.fetch(target[:0], 0), lambda: seen.append("nothing"))
    assert seen == [[128, 129], "nothing"]
    assert (memory.counters.gets, memory.counters.bytes_got) == (2, 2)


def test_a_view_is_of_the_block_where_it_is_near(block):
    memory, segment = block
    view = memory.near_view(8, np.dtype("int32"), (2, 3))
    if memory.near is None:
        assert view is None
    else:
        assert view.shape == (2, 3) and view.tobytes() == segment[136:160].tobytes()


def test_nothing_moves_after_the_close(block):
    memory, _ = block
    memory.context.closed = True
    with pytest.raises(ClosedError, match="buffer of rank 3: the machine is already closed"):
        memory.get([memory.fetch(np.zeros(1), 0)])


@pytest.mark.mpi
def test_values_are_broadcast_and_converted_without_loss_only(there):
    array = there.view(np.float64, (3, 4))
    # Puts to one place have no order without a flush between them.
    array[...] = 0
    there.flush()
    array[1] = np.arange(4, dtype=np.int32)
    there.flush()
    array[:, 2] = torch.tensor([5.0, 6.0, 7.0])
    array[0, ::-3] = 0.1
    there.flush()
    assert array[...].tolist() == [[0.1, 0, 5, 0.1], [0, 1, 6, 3], [0, 0, 7, 0]]


@pytest.mark.mpi
def test_a_view_of_ones_own_buffer_may_overlap_what_is_put_into_it(meet, comm):
    buffer, remotes = meet(800)
    mine = buffer.view(np.int64, (100,))
    mine[:] = np.arange(100)
    remotes[comm.rank].view(np.int64, (100,))[1:] = mine[:-1]
    assert mine.tolist() == [0, *range(99)]
    remotes[comm.rank].get(mine[:99], 8)
    assert mine.tolist() == [*range(99), 98]


@pytest.mark.mpi
def test_a_remote_array_is_a_sequence_of_rows_and_an_array(around):
    remote = around[2]
    there = remote.view(np.int16, (2, 3))
    there[...] = [[1, 2, 3], [4, 5, 6]]
    remote.flush()
    assert len(there) == 2 and [row.tolist() for row in there] == [[1, 2, 3], [4, 5, 6]]
    assert np.asarray(there).tolist() == np.array(there, np.float64).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [0, 1, 7, 64, 4097, 1 << 20, 5 << 20])
def test_what_is_put_is_there_after_the_notification_and_nothing_around_it(meet, comm, nbytes):
    buffer, remotes = meet(nbytes + 16, 1)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer.array[:] = 255
    comm.Barrier()
    data = np.random.default_rng(comm.rank).integers(0, 255, nbytes).astype(np.uint8)
    remotes[after].put_notify(data, 0, 9, offset=8)
    data[:] = 0
    assert buffer.notify_wait(0) == 9
    wanted = np.random.default_rng(before).integers(0, 255, nbytes).astype(np.uint8)
    assert (buffer.array[8 : 8 + nbytes] == wanted).all()
    assert (buffer.array[:8] == 255).all() and (buffer.array[8 + nbytes :] == 255).all()


@pytest.mark.mpi
@pytest.mark.mpi(min_size=2)
def test_a_get_that_is_not_answered_says_how_much_it_asked_for(there, unanswered, monkeypatch):
    unanswered(there)
    monkeypatch.setattr("distdl_rma.segments.memory.context.Queue.test", lambda self: False)
    with pytest.raises(ExchangeTimeout, match="to answer a get of 24 bytes"):
        there.get(np.zeros(3), timeout=0)


@pytest.mark.mpi
@pytest.mark.parametrize("shift", [-(1 << 10), 1 << 10])
def test_a_buffer_may_be_moved_within_itself(meet, comm, shift):
    buffer, _ = meet(3 << 20)
    values = np.random.default_rng(comm.rank).integers(0, 255, 2 << 20).astype(np.uint8)
    part = buffer.view(np.uint8, values.shape, 1 << 19)
    part[...] = values
    buffer.here.put(part, offset=(1 << 19) + shift)
    buffer.here.flush()
    assert (buffer.view(np.uint8, values.shape, (1 << 19) + shift) == values).all()

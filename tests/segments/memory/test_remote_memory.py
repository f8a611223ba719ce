"""Which bytes of a peer's segment are meant, near and far."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from distdl_rma.errors import ArgumentError, ClosedError, ShapeError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.memory.remote_memory import RemoteMemory
from distdl_rma.segments.transport.links import SharedLink


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


def test_a_get_fills_its_target_from_the_block(block):
    memory, segment = block
    target, others = np.zeros((2, 3), ">u2"), np.zeros(4, np.uint8)
    memory.get([memory.fetch(target, 4), memory.fetch(others, 60)])
    assert target.tobytes() == segment[132:144].tobytes() and others.tolist() == [188, 189, 190, 191]
    assert (memory.counters.gets, memory.counters.bytes_got) == (2, 16)


def test_a_put_reaches_the_block_only(block):
    memory, segment = block
    before = segment.copy()
    memory.put(memory.runs(10, 3), np.full(3, 255, np.uint8), None)
    assert (segment[138:141] == 255).all()
    segment[138:141] = before[138:141]
    assert (segment == before).all()


def test_what_follows_a_get_comes_when_the_target_is_filled(block):
    memory, _ = block
    target, seen = np.zeros(2, np.uint8), []
    memory.get_then(memory.fetch(target, 0), lambda: seen.append(target.tolist()))
    memory.get_then(memory.fetch(target[:0], 0), lambda: seen.append("nothing"))
    assert seen == [[128, 129], "nothing"]


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

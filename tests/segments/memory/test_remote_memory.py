"""Which bytes of a peer's segment are meant, near and far."""

import math
import threading
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given

from distdl_rma.errors import ArgumentError, ClosedError, ShapeError
from distdl_rma.segments.memory.remote_memory import RemoteMemory
from distdl_rma.segments.transport.links import ByteRuns, SharedLink
from distdl_rma.trace import Counters
from tests.segments.strategies import slices


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
    memory.put(ByteRuns((memory.begin + 10,), 3), np.full(3, 255, np.uint8), None)
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


@pytest.mark.mpi
def test_shapes_of_views_are_checked(there):
    for shape in ((2**32, 2**32), (1 << 62, 2), (there.nbytes + 1,)):
        with pytest.raises(ShapeError, match="not inside rank"):
            there.view(np.uint8, shape)
    for dtype, shape in ((np.uint8, (-1, 5)), (object, (1,))):
        with pytest.raises(ShapeError, match="no segment holds"):
            there.view(dtype, shape)


@pytest.mark.mpi
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(slices(), hypothesis.strategies.sampled_from(["uint8", "float32", ">i4", "complex128"]))
def test_slices_of_a_peers_array_are_those_of_numpy(there, shape_and_key, dtype):
    shape, key = shape_and_key
    model = np.array(np.arange(math.prod(shape)).reshape(shape) % 100, dtype)
    array = there.view(dtype, shape, 3)
    array[...] = model
    there.flush()
    part = np.asarray(model[key])
    assert array[key].dtype == dtype and array[key].shape == part.shape and (array[key] == part).all()
    model[key] = np.array(part[::-1] if part.ndim else part) + model.dtype.type(50)
    array[key] = np.array(model[key], dtype)
    there.flush()
    assert (array[...] == model).all()


@pytest.mark.mpi
def test_values_are_broadcast_and_converted_without_loss_only(there):
    array = there.view(np.float64, (3, 4))
    array[...] = 0
    array[1] = np.arange(4, dtype=np.int32)
    array[:, 2] = torch.tensor([5.0, 6.0, 7.0])
    array[0, ::-3] = 0.1
    there.flush()
    assert array[...].tolist() == [[0.1, 0, 5, 0.1], [0, 1, 6, 3], [0, 0, 7, 0]]
    for data in (
        np.zeros(5),
        np.zeros((3, 4, 1)),
        np.zeros(4, complex),
        "text",
        2**2000,
        [1, 2, 3],
        ["1", 2, 3, 4],
    ):
        with pytest.raises(ShapeError, match="put"):
            array[0] = data
    with pytest.raises(ShapeError, match="without a loss"):
        there.view(np.int32, (3,))[:] = 1.5


@pytest.mark.mpi
def test_a_slice_may_be_changed_after_it_was_put(there, machine):
    queue = machine.segments.queue()
    array, data = there.view(np.int64, (50, 2)), np.arange(50)
    array[:, 1] = data
    data[:] = -1
    array.put((slice(None), 0), data, queue)
    data[:] = -2
    there.flush()
    queue.wait()
    assert array[...].tolist() == [[-1, i] for i in range(50)]


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
    point = remote.view(np.int16, ())
    for call in (len, iter):
        with pytest.raises(TypeError, match="without dimensions"):
            call(point)

"""A peer's buffer: which bytes are meant, near and far; puts, gets and notifications."""

import math
import threading
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given

from distdl_rma import ArgumentError, ClosedError, ConfigurationError, ExchangeTimeout, Machine, ShapeError
from distdl_rma.segments.memory.remote_buffer import RemoteMemory
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


def bytes_at(remote, nbytes, offset=0):
    remote.flush()
    out = np.empty(nbytes, np.uint8)
    remote.get(out, offset)
    return out


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
def test_every_rank_puts_to_and_gets_from_every_rank(meet, comm):
    buffer, remotes = meet(8 * comm.size, comm.size)
    for peer, remote in remotes.items():
        remote.put_notify(np.array([100 * comm.rank + peer]), comm.rank, 1 + peer, offset=8 * comm.rank)
    for peer in range(comm.size):
        assert buffer.notify_wait(peer) == 1 + comm.rank
    assert buffer.view(np.int64, (comm.size,)).tolist() == [100 * p + comm.rank for p in range(comm.size)]
    comm.Barrier()
    for peer, remote in remotes.items():
        out = np.zeros(comm.size, np.int64)
        remote.get(out)
        assert out.tolist() == [100 * p + peer for p in range(comm.size)]


@pytest.mark.parametrize(
    "data", [np.arange(12.0).reshape(3, 4), np.arange(6) + 1j, np.arange(4, dtype=">u2")]
)
@pytest.mark.mpi
def test_arrays_of_any_order_arrive_row_major_with_their_bytes_as_they_are(there, data):
    for view in (data, data[::2], data[..., ::-1], np.asfortranarray(data), data.T):
        there.put(view, 16)
        assert bytes_at(there, view.nbytes, 16).tobytes() == view.tobytes()


@pytest.mark.mpi
def test_structured_readonly_and_zero_dimensional_arrays_bytes_and_numbers_are_put(there):
    pairs = np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", ">f8")])
    pairs.flags.writeable = False
    for data, content in (
        (pairs, pairs.tobytes()),
        (np.array(2.5), np.array(2.5).tobytes()),
        (np.float32(0.5), np.float32(0.5).tobytes()),
        (b"hello", b"hello"),
        (memoryview(b"h-e-l-l-o")[::2], b"hello"),
        (bytearray(b"hello"), b"hello"),
    ):
        there.put(data, 5)
        assert bytes_at(there, len(content), 5).tobytes() == content


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64])
def test_tensors_are_put_and_got(there, dtype):
    tensor = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    for view in (tensor, tensor.T, tensor[1:, ::2], tensor[2, 3], tensor[:0]):
        there.put(view, 8)
        out = torch.ones_like(view)
        there.flush()
        there.get(out, 8)
        assert torch.equal(out, view)


@pytest.mark.mpi
def test_a_get_fills_any_writable_array_and_refuses_others(there):
    there.put(np.arange(6, dtype=np.int32))
    there.flush()
    whole = np.zeros((6, 4), np.int32)
    there.get(whole.T[1, ::2], 4)
    assert whole[:, 1].tolist() == [1, 0, 2, 0, 3, 0] and whole.sum() == 6
    raw = bytearray(8)
    there.get(raw)
    assert bytes(raw) == np.array([0, 1], np.int32).tobytes()
    for out in (b"12345678", np.float64(1), np.broadcast_to(np.zeros(1), (3,))):
        with pytest.raises(ShapeError, match="read-only"):
            there.get(out)


@pytest.mark.mpi
def test_tensors_without_plain_memory_are_refused_with_the_reason(there):
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)):
        for call in (there.put, there.get, lambda t: there.view(np.float32, (2,)).put(..., t)):
            with pytest.raises(ShapeError, match="not an array that numpy can look at"):
                call(tensor)


@pytest.mark.mpi
def test_a_list_of_puts_is_checked_before_any_data_moves(there):
    there.put(np.zeros(8, np.uint8))
    there.put_list([(np.array([1, 2], np.uint8), 0), (b"\3", 7), (torch.tensor([4], dtype=torch.uint8), 3)])
    assert bytes_at(there, 8).tolist() == [1, 2, 0, 4, 0, 0, 0, 3]
    with pytest.raises(ShapeError, match="not inside rank"):
        there.put_list([(b"\7", 0), (b"\7", there.nbytes)])
    there.put_list([])
    assert bytes_at(there, 8).tolist() == [1, 2, 0, 4, 0, 0, 0, 3]


@pytest.mark.mpi
def test_offsets_indices_and_values_are_integers_of_any_kind(meet, comm):
    buffer, remotes = meet(4096, 200)
    me = remotes[comm.rank]
    me.put(np.full(200, 7, np.uint8), np.uint8(250))
    assert bytes_at(me, 200, np.int16(250)).tolist() == [7] * 200
    for kind in (np.uint8, np.int32, np.uint32, np.int64, np.uint64):
        for value in (1, 200):
            me.notify(kind(199), kind(value))
            assert buffer.notify_wait(kind(199)) == value
    me.notify(0, np.uint32(2**32 - 1))
    assert buffer.notify_reset(np.int8(0)) == 2**32 - 1
    me.notify(1, True)
    assert buffer.notify_reset(1) == 1
    for index, value in ((0, 1.5), (0.0, 1), (0, "1")):
        with pytest.raises(TypeError, match="integer"):
            me.notify(index, value)
    with pytest.raises(TypeError, match="integer"):
        me.put(b"1", 8.0)


@pytest.mark.mpi
@pytest.mark.parametrize("offset", [-1, 4090, 2**40, 2**70, np.int64(2**63 - 4), np.uint64(2**64 - 8)])
def test_nothing_reaches_outside_of_the_peers_buffer(meet, comm, offset):
    remote = meet(4096, 1)[1][comm.rank]
    for call in (
        lambda: remote.put(np.zeros(8, np.uint8), offset),
        lambda: remote.put_list([(np.zeros(8, np.uint8), offset)]),
        lambda: remote.get(np.zeros(8, np.uint8), offset),
        lambda: remote.view(np.uint8, (8,), offset),
        lambda: remote.fetch_add(offset, 1),
    ):
        with pytest.raises(ShapeError, match=r"not inside rank|inside rank .* buffer"):
            call()


@pytest.mark.mpi
@pytest.mark.parametrize("value", [0, -1, 2**32, 2**80])
def test_a_notified_put_with_a_wrong_value_or_index_moves_no_data(there, value):
    there.put(b"\1")
    with pytest.raises(ArgumentError, match=r"from 1 to 2\*\*32 - 1"):
        there.put_notify(b"\2", 0, value)
    with pytest.raises(ArgumentError, match="notification 4 of a buffer that has 4"):
        there.put_notify(b"\2", 4)
    assert bytes_at(there, 1).tolist() == [1]


@pytest.mark.mpi
def test_what_is_no_queue_part_or_timeout_is_refused_before_anything_moves(around, comm):
    _, buffer, remote = around
    array = remote.view(np.uint8, 4)
    for call in (
        lambda: remote.put(b"1", queue="q"),
        lambda: remote.put_notify(b"1", 0, queue=3),
        lambda: remote.put_list([(b"1", 0)], queue="q"),
        lambda: remote.get(np.zeros(1), queue="q"),
        lambda: array.put(0, 1, "q"),
        lambda: remote.put_list([(b"1", 0), b"22"]),
        lambda: remote.put_list([(b"1", 0), (b"1", "x")]),
        lambda: remote.put_list([(b"1", 0), 5]),
        lambda: remote.put_list(None),
        lambda: remote.view(np.uint8, 4, 0.5),
        lambda: remote.view("nonsense", 4),
        lambda: buffer.view("S", 4),
        lambda: array.__setitem__(0, 2**53 + 0.5),
    ):
        with pytest.raises((ArgumentError, ShapeError)):
            call()
    for wait in (
        lambda: remote.get(np.zeros(1), timeout=-1),
        lambda: remote.fetch_add(0, 1, timeout=-1),
        lambda: remote.compare_swap(0, 1, 1, timeout="x"),
        lambda: remote.flush(timeout=float("nan")),
    ):
        with pytest.raises(ConfigurationError, match="a timeout is"):
            wait()
    remote.flush()
    comm.Barrier()
    assert not buffer.array.any() and buffer.notify_test() is None


@pytest.mark.mpi
@pytest.mark.mpi(min_size=2)
def test_a_get_that_is_not_answered_says_how_much_it_asked_for(there, unanswered, monkeypatch):
    unanswered(there)
    monkeypatch.setattr("distdl_rma.segments.memory.context.Queue.test", lambda self: False)
    with pytest.raises(ExchangeTimeout, match="to answer a get of 24 bytes"):
        there.get(np.zeros(3), timeout=0)


@pytest.mark.mpi
def test_counters_count_bytes_and_operations(there, machine):
    counters = machine.segments.counters
    before = counters.puts, counters.bytes_put, counters.gets, counters.bytes_got
    there.put(np.zeros(10))
    there.view(np.int16, (4, 4))[::2, 1] = 3
    there.get(np.zeros(3))
    there.view(np.int16, (4, 4))[1]
    after = counters.puts, counters.bytes_put, counters.gets, counters.bytes_got
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 84, 2, 32]


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_every_operation_after_the_close_says_so(comm, transport):
    machine = Machine(comm, segment_size="1MiB", transport=transport)
    buffer = machine.segments.get_segment_buffer(64, 2)
    remote = buffer.exchange({(comm.rank + 1) % comm.size: (), (comm.rank - 1) % comm.size: ()})[
        (comm.rank + 1) % comm.size
    ]
    array, queue = remote.view(np.uint8, (8,)), machine.segments.queue()
    remote.put(b"12345678", queue=queue)
    machine.close()
    for call in (
        lambda: remote.put(b"1"),
        lambda: remote.put_list([(b"1", 0)]),
        lambda: remote.put_notify(b"1", 0),
        lambda: remote.notify(0),
        lambda: remote.get(np.zeros(1)),
        lambda: remote.fetch_add(0, 1),
        lambda: remote.compare_swap(0, 1, 1),
        remote.flush,
        lambda: array.__setitem__(0, 1),
        lambda: array[0],
        queue.wait,
        queue.test,
        lambda: buffer.notification(0),
        buffer.notify_test,
        buffer.notify_waitsome,
        lambda: buffer.notify_wait(0),
        lambda: buffer.notify_reset(0),
        lambda: buffer.here,
        lambda: buffer.view(np.uint8, (1,)),
        machine.segments.stats,
        machine.describe,
    ):
        with pytest.raises(ClosedError, match="already"):
            call()


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

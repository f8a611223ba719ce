"""What buffers refuse, each before anything moves, and what a machine that is closed says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distdl_rma import (
    ArgumentError,
    ClosedError,
    ConfigurationError,
    Machine,
    PartitionError,
    SegmentError,
    ShapeError,
)

pytestmark = pytest.mark.mpi

ONE, FROZEN, BIG = np.ones(1, np.uint8), np.broadcast_to(np.zeros(1), (3,)), np.zeros(8, np.uint8)
EXPANDED, PAIRS = torch.zeros(1, dtype=torch.uint8).expand(4), np.dtype(("f4", (2,)))
HALF, GRAD = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)
# Of 1024 bytes at the peer, and two notifications.
OFFSETS = (-1, 1018, 2**40, 2**70, np.int64(2**63 - 4), np.uint64(2**64 - 8))
OUTSIDE = {
    "put": lambda r, at: r.put(BIG, at),
    "put_list": lambda r, at: r.put_list([(ONE, 0), (BIG, at)]),
    "put_list_notify": lambda r, at: r.put_list_notify([(ONE, 0), (BIG, at)], 0),
    "get": lambda r, at: r.get(BIG, at),
    "get_list": lambda r, at: r.get_list([(BIG, 0), (BIG, at)]),
}
# The second one is of a subclass.
MASKED = np.ma.array([1.0, 2.0], mask=[0, 1]), np.ma.masked
# Calls with the peer's buffer, and words of their errors.
REMOTE = [
    (ShapeError, "not inside rank",
     *(lambda r, c=c, at=at: c(r, at) for c in OUTSIDE.values() for at in OFFSETS)),
    (ShapeError, "8 bytes at a multiple of 8 inside rank",
     *(lambda r, at=at: r.fetch_add(at, 1) for at in (-8, 4, 7, 1017, 1024, 2**70)),
     *(lambda r, at=at: r.compare_swap(at, 0, 1) for at in (-8, 4, 1024)), lambda r: r.atomic_load(4)),
    (ArgumentError, "integers of 64 bits",
     *(lambda r, v=v: r.fetch_add(0, v) for v in (2**63, -(2**63) - 1, np.uint64(2**63))),
     *(lambda r, v=v: r.compare_swap(0, 0, v) for v in (2**63, -(2**63) - 1)),
     lambda r: r.compare_swap(0, 2**63, 0),
     lambda r: r.atomic_store(0, 2**63), lambda r: r.atomic_swap(0, 2**63)),
    (ArgumentError, "integer|whole number", lambda r: r.fetch_add(0, 1.5),
     lambda r: r.fetch_add(0.0, 1), lambda r: r.atomic_store(0, "1"), lambda r: r.atomic_load(None),
     lambda r: r.compare_swap(0, 0, None), lambda r: r.put(ONE, 8.0), lambda r: r.notify(0, 1.5),
     lambda r: r.notify(0.0, 1), lambda r: r.notify(0, "1"), lambda r: r.put_notify(ONE, None),
     lambda r: r.put_notify(ONE, 0, 1.0), lambda r: r.put_notify(ONE, 0, 1, "8"),
     lambda r: r.put_list_notify([(ONE, 0)], 0.5)),
    (ArgumentError, "notification (-1|2) of a buffer that has 2", lambda r: r.notify(-1),
     lambda r: r.notify(2),
     lambda r: r.put_notify(ONE, 2), lambda r: r.put_notify(ONE, -1),
     lambda r: r.put_list_notify([(ONE, 0)], 2)),
    (ArgumentError, r"from 1 to 2\*\*32 - 1",
     *(lambda r, v=v: r.put_notify(ONE, 0, v) for v in (0, -1, 2**32, 2**80)),
     lambda r: r.put_list_notify([(ONE, 0)], 0, 2**32), lambda r: r.notify(0, 2**32),
     lambda r: r.notify(0, 0)),
    (ArgumentError, "a queue is made by", lambda r: r.put(ONE, queue="q"),
     lambda r: r.put_notify(ONE, 0, queue=3),
     lambda r: r.put_list([(ONE, 0)], queue="q"), lambda r: r.get(BIG, queue="q"),
     lambda r: r.get_list([(BIG, 0)], queue=[])),
    (ShapeError, "takes pairs",
     lambda r: r.put_list([(ONE, 0), (ONE, "x")]),
     lambda r: r.put_list([(ONE, 0), 5]), lambda r: r.put_list(None),
     lambda r: r.get_list([(BIG, 0), (BIG,)]),
     lambda r: r.get_list([(BIG, 0), (BIG, 0.5)])),
    (ShapeError, "tensor or bytes, got (list|int)", lambda r: r.put_list([(ONE, 0), b"22"]),
     lambda r: r.put([1, 2, 3]), lambda r: r.get([1])),
    (ShapeError, "read-only", lambda r: r.get(b"12345678"), lambda r: r.get(np.float64(1)),
     lambda r: r.get(FROZEN),
     lambda r: r.get_list([(BIG, 0), (FROZEN, 0)])),
    (ShapeError, "several elements in one place", lambda r: r.get(EXPANDED),
     lambda r: r.get_list([(BIG, 0), (EXPANDED, 0)])),
    (ShapeError, "Python objects mean nothing", lambda r: r.put(np.zeros(2, object)),
     lambda r: r.put_notify(np.zeros(2, object), 0), lambda r: r.get(np.zeros(2, object))),
    (ShapeError, "a masked array: what is masked has no value",
     *(lambda r, m=m: r.put(m) for m in MASKED), *(lambda r, m=m: r.put_notify(m, 0) for m in MASKED),
     *(lambda r, m=m: r.put_list([(ONE, 0), (m, 0)]) for m in MASKED),
     lambda r: r.get(MASKED[0])),
    (ShapeError, "not an array that numpy can look at",
     *(lambda r, t=t: r.put(t) for t in (HALF, GRAD)), *(lambda r, t=t: r.get(t) for t in (HALF, GRAD))),
    (ConfigurationError, "a timeout is", lambda r: r.get(BIG, timeout=-1),
     lambda r: r.fetch_add(0, 1, timeout=-1),
     lambda r: r.compare_swap(0, 1, 1, timeout="x"), lambda r: r.flush(timeout=float("nan")),
     lambda r: r.get_list([(BIG, 0)], timeout=-1)),
]  # fmt: skip
GETS = [
    (ArgumentError, "notification 2 of a buffer that has 2", lambda r, b: r.get_notify(BIG, b, 2)),
    (ArgumentError, "value is from 1", lambda r, b: r.get_notify(BIG, b, 0, 0)),
    (ShapeError, "not inside rank", lambda r, b: r.get_notify(BIG, b, 0, offset=1017)),
    (ArgumentError, "a buffer of this rank, got RemoteBuffer", lambda r, b: r.get_notify(BIG, r, 0)),
    (ShapeError, "read-only", lambda r, b: r.get_notify(b"12345678", b, 0)),
]  # fmt: skip
WAITS = ("notify_wait", "notify_reset", "notification", "notify_waitsome")
# Calls with the rank's own buffer.
OWN = [
    (ArgumentError, "notification",
     *(lambda b, n=n, i=i: getattr(b, n)(i) for n in WAITS for i in (0.0, "a"))),
    (ArgumentError, r"notification (-1|2|\d{22}) of a buffer that has 2",
     *(lambda b, n=n, i=i: getattr(b, n)(i) for n in WAITS[:3] for i in (-1, 2, 2**70))),
    (ArgumentError, r"notifications .* of a buffer that has 2 of them",
     *(lambda b, n=n, r=r: getattr(b, n)(*r) for n in ("notify_waitsome", "notify_test")
       for r in ((-1, 2), (0, 3), (2, 1), (3, 0), (1, -1), (0, 2**70)))),
    (ArgumentError, "would not end", lambda b: b.notify_waitsome(1, 0), lambda b: b.notify_waitsome(2)),
    (ConfigurationError, "a timeout is a number of seconds",
     *(lambda b, t=t: b.notify_wait(0, timeout=t) for t in (-1, "soon", float("nan"))),
     lambda b: b.exchange([b.here.peer], timeout=-1)),
    (PartitionError, "sender 1000 is none of the machine's ranks",
     *(lambda b, n=n: getattr(b, n)(0, senders=[1000]) for n in ("notify_wait", "notify_waitsome"))),
    (PartitionError, r"99 is none of the machine's ranks \(0,",
     lambda b: b.exchange({b.here.peer: (), 99: ()})),
    (PartitionError, r"exchange 'twice': rank 0 is listed more than once in \[0, 0\]",
     lambda b: b.exchange([0, 0], "twice")),
    (ArgumentError, "takes rank ids, or notes by rank id, got",
     *(lambda b, w=w: b.exchange(w) for w in ("01", 1, [0.5]))),
    (ArgumentError, "the note for rank",
     *(lambda b, n=n: b.exchange({b.here.peer: n}) for n in ((1.5,), (1, 2, 3, 4, 5), (2**63,), None, 3))),
    (ArgumentError, "label is a string", lambda b: b.exchange([b.here.peer], 5)),
    (ArgumentError, "a fingerprint", lambda b: b.exchange([b.here.peer], fingerprint=1 << 63)),
    (ShapeError, "no segment holds",
     *(lambda b, a=a: b.view(*a)
       for a in (("S", 4), ("u1", (-1, 5)), ("O", 1), (PAIRS, 2), ("nonsense", 4)))),
]  # fmt: skip


def test_what_is_refused_says_why_moves_nothing_and_leaves_the_machine_usable(around, comm):
    machine, buffer, remote = around
    before = machine.segments.stats().owners
    rows = [(row, (remote,)) for row in REMOTE] + [(row, (remote, buffer)) for row in GETS]
    rows += [(row, (buffer,)) for row in OWN]
    for after, ((error, words, *calls), given) in enumerate(rows, 1):
        for number, call in enumerate(calls):
            try:
                with pytest.raises(error, match=words):
                    call(*given)
            except BaseException as failed:
                failed.add_note(f"call {number} of {words!r}")
                raise
        buffer.here.notify(1, after)
        assert buffer.notify_wait(1) == after
    for size in (-1, 1.5, "8", None, True):
        with pytest.raises(ArgumentError, match="bytes"):
            machine.segments.get_segment_buffer(size)
    for number in (-1, 1.5, "8", None, True):
        with pytest.raises(ArgumentError, match=rf"notifications, at least 0, got {number!r}"):
            machine.segments.get_segment_buffer(8, number)
    with pytest.raises(SegmentError, match=r"asked for \d+ bytes, .* free, largest block .*SEGMENT_SIZE"):
        machine.segments.get_segment_buffer(1 << 40)
    with Machine(comm, segment_size="1MiB") as other:
        foreign = other.segments.get_segment_buffer(0, 1, "foreign")
        with pytest.raises(ArgumentError, match="'foreign' is of another machine"):
            remote.get_notify(BIG, foreign, 0)
    with machine.segments.get_segment_buffer(0) as empty:
        assert buffer.notify_test(1, 0) is None and empty.notify_test() is None
        with pytest.raises(ArgumentError, match="would not end"):
            empty.notify_waitsome()
    remote.flush()
    comm.Barrier()
    assert not buffer.array.any() and buffer.notify_test() is None and not BIG.any()
    assert machine.segments.stats().owners == before
    assert buffer.exchange({comm.rank: (1, -(2**63))})[comm.rank].note == (1, -(2**63), 0, 0)
    buffer.free()
    for name in WAITS:
        with pytest.raises(ClosedError, match="already freed"):
            getattr(buffer, name)(0)
    with pytest.raises(ClosedError, match="already freed"):
        remote.get_notify(BIG, buffer, 0)


@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_every_operation_after_the_close_says_so(comm, transport):
    machine = Machine(comm, segment_size="1MiB", transport=transport)
    buffer = machine.segments.get_segment_buffer(64, 2)
    remote = buffer.exchange(machine.ranks)[(comm.rank + 1) % comm.size]
    queue = machine.segments.queue()
    remote.put(b"12345678", queue=queue)
    machine.close()
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
        queue.wait,
        queue.test,
        buffer.notify_test,
        *(lambda name=name: getattr(buffer, name)(0) for name in WAITS),
        lambda: buffer.here,
        lambda: buffer.view(np.uint8, (1,)),
        lambda: machine.segments.get_segment_buffer(8),
        lambda: buffer.array,
        machine.segments.stats,
        machine.describe,
    ):
        with pytest.raises(ClosedError, match="already"):
            call()

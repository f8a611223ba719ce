"""One-sided communication against mpi4py: puts, notifications, atomics, barriers; what a channel holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from benchmarks.measure import COMM, Row, compare
from distdl_rma import Machine
from distdl_rma.geometry import Decomposition, Exchange, Window
from distdl_rma.geometry.halo import WindowSplit
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments import Channel, Queue

# Bytes, name, ratio to reach, round trips per sample.
PUTS = ((8, "8 B", 0.85, 500), (64 << 10, "64 KiB", 0.3, 200), (1 << 20, "1 MiB", 0.35, 50))
STREAM = 500
# Put by MPI, though the peer is on the same host.
FAR_BYTES = 64 << 20


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on 2 ranks."""
    for nbytes, label, target, repeats in PUTS:
        yield notified_put(machine, nbytes, label, target, repeats)
    with Machine(COMM, segment_size=2 * FAR_BYTES, transport="remote", progress="none") as far:
        # A put without a queue copies its source first. Send copies nothing, as a put with a queue.
        for label, queue in (("64 MiB", None), ("64 MiB of a queue", far.segments.queue())):
            yield notified_put(far, FAR_BYTES, f"{label}, transport='remote'", 1.5, 1, queue)
    yield notifications(machine)
    yield fetch_add(machine)
    yield barrier(machine)
    yield channel_memory(machine)


def notified_put(
    machine: Machine, nbytes: int, label: str, target: float, inner: int, queue: Queue | None = None
) -> Row:
    """Ping-pong, there and back."""
    buffer = machine.segments.get_segment_buffer(nbytes, notifications=1)
    peer = 1 - machine.rank
    remote = buffer.exchange({peer: ()})[peer]
    data = np.zeros(nbytes, np.uint8)
    into = np.zeros(nbytes, np.uint8)

    def ours() -> None:
        if machine.rank == 0:
            remote.put_notify(data, 0, queue=queue)
            buffer.notify_wait(0)
        else:
            buffer.notify_wait(0)
            remote.put_notify(data, 0, queue=queue)
            # Takes no time on a node.
            remote.flush()

    def send_recv() -> None:
        if machine.rank == 0:
            COMM.Send(data, peer)
            COMM.Recv(into, peer)
        else:
            COMM.Recv(into, peer)
            COMM.Send(data, peer)

    row = compare(
        f"put_notify + notify_wait, there and back, {label}",
        ours,
        send_recv,
        against="mpi4py Send/Recv",
        target=target,
        inner=inner,
    )
    COMM.Barrier()
    buffer.free()
    return row


def notifications(machine: Machine) -> Row:
    """A stream of notifications from rank 0 to rank 1, each waited for and reset; time of one."""
    buffer = machine.segments.get_segment_buffer(0, notifications=STREAM)
    peer = 1 - machine.rank
    remote = buffer.exchange({peer: ()})[peer]
    nothing = np.zeros(0, np.uint8)

    def ours() -> None:
        if machine.rank == 0:
            for i in range(STREAM):
                remote.notify(i)
            buffer.notify_wait(0)
        else:
            for _ in range(STREAM):
                buffer.notify_reset(buffer.notify_waitsome())
            remote.notify(0)

    def send_recv() -> None:
        for _ in range(STREAM):
            if machine.rank == 0:
                COMM.Send(nothing, peer)
            else:
                COMM.Recv(nothing, peer)

    row = compare(
        f"stream of {STREAM} notifications, notify to notify_waitsome + notify_reset",
        ours,
        send_recv,
        against="mpi4py Send/Recv of no bytes",
    )
    COMM.Barrier()
    buffer.free()
    return row


def fetch_add(machine: Machine) -> Row:
    """An integer of the peer, added to and fetched by both ranks at the same time."""
    buffer = machine.segments.get_segment_buffer(8)
    peer = 1 - machine.rank
    remote = buffer.exchange({peer: ()})[peer]
    window = MPI.Win.Allocate(8, comm=COMM)
    window.Lock_all()
    one, old = np.ones(1, np.int64), np.empty(1, np.int64)

    def of_mpi() -> None:
        window.Fetch_and_op(one, old, peer)
        window.Flush(peer)

    row = compare(
        "fetch_add",
        lambda: remote.fetch_add(0, 1),
        of_mpi,
        against="mpi4py Fetch_and_op and Flush",
        target=1.2,
        inner=500,
    )
    window.Unlock_all()
    window.Free()
    COMM.Barrier()
    buffer.free()
    return row


def barrier(machine: Machine) -> Row:
    """A barrier of all ranks."""
    everyone = machine.group(name="barrier")
    row = compare("barrier", everyone.barrier, COMM.Barrier, against="mpi4py Barrier", target=1.2, inner=500)
    everyone.close()
    return row


def channel_memory(machine: Machine) -> Row:
    """Bytes of segment of a halo channel beyond 4 KiB, against two slots of its halo."""
    line = machine.partition((1, 1, machine.size, 1))
    own = Decomposition.balanced(line, (1, 16, 256, 256))
    window = Window(3, left=1, right=1)
    rows_read = WindowSplit(Balanced(window.outputs(256), machine.size), window, 256)
    exchange = Exchange(machine.rank, own, own.with_splits({2: rows_read}))
    before = machine.segments.stats().used
    channel = Channel(machine.segments, exchange, np.float32, "memory")
    halo = sum(piece.box.volume for piece in exchange.receives) * 4
    used = machine.segments.stats().used - before
    channel.close()
    return Row(
        "segment of a channel, beyond 4 KiB",
        "two slots of its halo",
        max(used - 4096, 0),
        0.0,
        2 * halo,
        0.0,
        1.1,
        "bytes",
    )

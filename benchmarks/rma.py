"""One-sided communication against mpi4py: notified puts and allreduce."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from benchmarks.measure import COMM, Row, compare
from distdl_rma import Machine
from distdl_rma.segments import Allreduce


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on 2 ranks."""
    for nbytes, label, put_target, repeats in ((8, "8 B", 1.2, 500), (64 << 10, "64 KiB", 0.4, 200)):
        yield notified_put(machine, nbytes, label, put_target, repeats)
    sizes: tuple[tuple[int, str, float | None, int], ...] = (
        (512, "2 KiB", None, 200),
        ((256 << 10) // 4, "256 KiB", None, 50),
        ((25 << 20) // 4, "25 MiB", 0.85, 2),
    )
    for count, label, target, inner in sizes:
        yield allreduce(machine, count, label, target, inner)


def notified_put(machine: Machine, nbytes: int, label: str, target: float, inner: int) -> Row:
    """Ping-pong; the time is that of one way."""
    buffer = machine.segments.get_segment_buffer(nbytes, notifications=1)
    peer = 1 - machine.rank
    remote = buffer.exchange({peer: ()})[peer]
    data = np.zeros(nbytes, np.uint8)
    into = np.zeros(nbytes, np.uint8)
    epoch = 0

    def ours() -> None:
        nonlocal epoch
        epoch += 1
        if machine.rank == 0:
            remote.put_notify(data, 0, epoch)
            buffer.notify_wait(0)
        else:
            buffer.notify_wait(0)
            remote.put_notify(data, 0, epoch)

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
    buffer.free()
    return row


def allreduce(machine: Machine, count: int, label: str, target: float | None, inner: int) -> Row:
    """Sum of float32 from segment to segment against MPI in place."""
    job = Allreduce(machine.segments, machine.ranks, count, np.float32, name=label)
    private = np.zeros(count, np.float32)
    for _ in range(2):
        job.active[:] = 0.0
        job.start()
        job.wait()

    def ours() -> None:
        job.start()
        job.wait()

    row = compare(
        f"Allreduce, {label} float32",
        ours,
        lambda: COMM.Allreduce(MPI.IN_PLACE, private),
        against="MPI_Allreduce in place",
        target=target,
        inner=inner,
    )
    job.close()
    return row

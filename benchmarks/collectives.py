"""Allreduce against MPI's, against gloo's, and against one copy of the data."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from benchmarks.measure import COMM, Row, compare
from distdl_rma import Machine
from distdl_rma.segments import Allreduce

# Elements of float32, name, ratio to reach, calls per sample.
SIZES = (
    (512, "2 KiB", 1.2, 200),
    (64 << 10, "256 KiB", 0.38, 50),
    (25 << 18, "25 MiB", 0.8, 2),
    (100 << 18, "100 MiB", 0.5, 1),
)


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on 2 ranks."""
    for count, label, target, inner in SIZES:
        private = np.zeros(count, np.float32)
        yield against(
            machine,
            count,
            label,
            lambda private=private: COMM.Allreduce(MPI.IN_PLACE, private),  # type: ignore[misc]
            "MPI_Allreduce in place",
            target,
            inner,
        )
    data, copy = np.zeros(100 << 18, np.float32), np.zeros(100 << 18, np.float32)
    yield against(
        machine, 100 << 18, "100 MiB", lambda: np.copyto(copy, data), "one memcpy of it", 1.4, inner=1
    )
    yield from gloo_rows(machine)


def gloo_rows(machine: Machine) -> Iterator[Row]:
    """The row that is also measured with more ranks than cores."""
    connect_gloo()
    tensor = torch.zeros(25 << 18)
    name = f"gloo all_reduce, {machine.size} ranks"
    yield against(machine, 25 << 18, "25 MiB", lambda: dist.all_reduce(tensor), name, 0.25, inner=1)
    dist.destroy_process_group()


def against(
    machine: Machine,
    count: int,
    label: str,
    baseline: Callable[[], object],
    name: str,
    target: float,
    inner: int,
) -> Row:
    """Sum of float32 from segment to segment."""
    job = Allreduce(machine.segments, machine.ranks, count, np.float32, name=f"{label} {name}")
    for _ in range(2):
        job.active[:] = 0.0
        job.start()
        job.wait()

    def ours() -> None:
        job.start()
        job.wait()

    row = compare(f"Allreduce, {label} float32", ours, baseline, against=name, target=target, inner=inner)
    COMM.Barrier()
    job.close()
    return row


def connect_gloo() -> None:
    """Process group of torch over the ranks of the job, on one host."""
    port = 0
    if COMM.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(COMM.bcast(port))
    dist.init_process_group("gloo", rank=COMM.rank, world_size=COMM.size, timeout=timedelta(seconds=60))

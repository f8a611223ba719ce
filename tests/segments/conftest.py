"""Segment managers over every kind of nodes, and a buffer on every rank as all of them see it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ON_TWO_HOSTS

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Machine
    from distdl_rma.segments import RemoteBuffer, SegmentBuffer, SegmentManager

# Transport, and ranks per simulated node: with 4 ranks one node, 1+1+1+1, 2+2 and 3+1. Where there is but one
# node of two or three, that has been seen already.
NODES = [
    pytest.param(("auto", None), id="one node", marks=pytest.mark.sizes(1, 2, 3, 4)),
    pytest.param(("remote", None), id="all remote", marks=pytest.mark.sizes(1, 2, 3, 4)),
    pytest.param(("auto", 2), id="pairs", marks=pytest.mark.sizes(3, 4)),
    pytest.param(("auto", 3), id="3+1", marks=pytest.mark.sizes(4)),
]
if ON_TWO_HOSTS:
    NODES = [pytest.param(("auto", None), id="real nodes")]


@pytest.fixture(scope="session", params=NODES)
def segments(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Generator[SegmentManager, None, None]:
    """Segment manager of all ranks, over every kind of nodes."""
    from distdl_rma.segments import SegmentManager

    transport, node_size = request.param
    own = comm.Dup()
    manager = SegmentManager(own, None, "64MiB", 15, transport, node_size=node_size)
    yield manager
    manager.close()
    own.Free()


Meet = Callable[..., "tuple[SegmentBuffer, dict[int, RemoteBuffer]]"]


@pytest.fixture
def meet(machine: Machine, comm: MPI.Intracomm) -> Generator[Meet]:
    """Function that makes a buffer on every rank, and returns it with everybody's, this rank's included."""
    made = []

    def make(nbytes: int, notifications: int = 0) -> tuple[SegmentBuffer, dict[int, RemoteBuffer]]:
        buffer = machine.segments.get_segment_buffer(nbytes, notifications, "test")
        # Before peers know it; memory that was used before is not cleared by the library.
        buffer.array[:] = 0
        made.append((buffer, buffer.exchange(dict.fromkeys(range(comm.size), ()), "test")))
        return made[-1]

    yield make
    for _, remotes in made:
        for remote in remotes.values():
            remote.flush()
    # What all ranks put has arrived: the memory may be used for something else.
    comm.Barrier()
    for buffer, _ in made:
        buffer.free()

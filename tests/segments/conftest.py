"""Segment managers over every kind of nodes, and a buffer on every rank as all of them see it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

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


@pytest.fixture
def closing(comm: MPI.Intracomm) -> Generator[Callable[[Any], Any]]:
    """Function that returns what it is given, and closes it at the end of the test."""
    with ExitStack() as stack:

        def kept(made: Any) -> Any:
            stack.callback(made.close)
            return made

        yield kept


@pytest.fixture
def opened(machine: Machine, closing: Callable[[Any], Any]) -> Callable[..., Any]:
    """Function that opens a channel of integers for a kind of movement, and returns it with its exchange."""
    from distdl_rma.segments import Channel
    from tests.segments.exchanges import movements

    def make(kind: str, name: str, lands: bool = False, transposed: bool = False) -> Any:
        exchange = movements(machine)[kind]
        exchange = exchange.T if transposed else exchange
        return closing(Channel(machine.segments, exchange, "i8", name, lands)), exchange

    return make


@pytest.fixture(params=[False, True], ids=["slots", "results"])
def lands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether peers put into results, of any size, where these are near."""
    from distdl_rma.segments import direct_receive

    monkeypatch.setattr(direct_receive, "_SMALLEST_NBYTES", 1)
    return request.param


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

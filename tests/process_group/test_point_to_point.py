"""Messages between two ranks: matched by tags, in their order, from whoever sends first."""

import numpy as np
import pytest

from distdl_rma.errors import ArgumentError, MismatchError
from distdl_rma.process_group.point_to_point import PointToPoint
from distdl_rma.process_group.work import OperationQueue
from distdl_rma.segments.collectives.between_nodes import Messages

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def nothing():
    """What is done when a message is there."""


@pytest.fixture
def points(machine, comm):
    messages, queue = (
        Messages(machine.segments, machine.ranks, "points"),
        OperationQueue(machine.segments, "points"),
    )
    messages.connect()
    yield PointToPoint(messages, queue, comm.rank, "points")
    comm.Barrier()
    messages.close()


def test_messages_of_one_tag_follow_one_another_and_those_of_others_do_not_wait(points, comm):
    target, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    wait = points._queue.wait
    got = {(tag, k): np.zeros(5, np.uint8) for tag in (0, 4) for k in range(3)}
    receives = [points.receive(got[4, k], "uint8", source, 4, nothing) for k in range(3)]
    sends = [
        points.send(np.full(5, 10 * tag + k, np.uint8), "uint8", target, tag)
        for tag in (0, 4)
        for k in range(3)
    ]
    for operation in reversed(receives):
        wait(operation, 20)
    receives = [points.receive(got[0, k], "uint8", source, 0, nothing) for k in range(3)]
    for operation in (*receives, *sends):
        wait(operation, 20)
    assert all((array == 10 * tag + k).all() for (tag, k), array in got.items())
    assert points._queue.idle


def test_the_first_that_sends_is_found(points, comm):
    wait, found = points._queue.wait, []
    if comm.rank == 0:
        for _ in range(comm.size - 1):
            out = np.zeros(3, np.uint8)
            wait(points.receive_any(out, "uint8", 2, found.append, nothing), 20)
            assert (out == found[-1]).all()
    else:
        wait(points.send(np.full(3, comm.rank, np.uint8), "uint8", 0, 2), 20)
    assert sorted(found) == (list(range(1, comm.size)) if comm.rank == 0 else [])


@pytest.mark.sizes(2, 3)
def test_both_learn_what_differs_and_the_next_message_comes(points, comm):
    with pytest.raises(ArgumentError, match="a tag is from 0 to"):
        points.send(np.zeros(1, np.uint8), "uint8", 0, -1)
    if comm.size == 1 or comm.rank > 1:
        return
    wait, peer = points._queue.wait, 1 - comm.rank
    x = np.zeros(8, np.uint8)
    for kind, fits in (("float32", False), ("float64", True)):
        if comm.rank == 0:
            operation = points.send(x, "float64", peer, 1)
        else:
            operation = points.receive(x, kind, peer, 1, nothing)
        if fits:
            wait(operation, 20)
        else:
            with pytest.raises(MismatchError, match="8 bytes of float64 are sent, but 8 bytes of float32"):
                wait(operation, 20)

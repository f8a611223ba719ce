"""Notices of ranks that fail."""

import threading

import numpy as np
import pytest

from distdl_rma.errors import PeerFailedError, ShapeError
from distdl_rma.segments.waiting.failure_notices import FailureNotices, cause_of
from distdl_rma.segments.waiting.header import HEADER_BYTES, HeaderWriter, RankState, WaitReason, parse


@pytest.fixture
def notices(comm):
    """Notices of this rank, over a communicator of their own, and its header; nobody waits at the end."""
    memory = np.zeros(HEADER_BYTES, np.uint8)
    header = HeaderWriter(memory.data, lambda: None)
    made = FailureNotices(comm.Dup(), tuple(range(10, 10 + comm.size)), threading.RLock(), header)
    yield made, memory
    comm.Barrier()
    made.close()


@pytest.mark.mpi
def test_all_hear_of_a_failure_once_and_the_one_that_failed_knows_when(notices, comm):
    made, memory = notices
    made.check()
    if comm.rank == 0:
        assert not made.in_vain
        made.tell("ShapeError: wrong")
        made.tell("never said")
        while not made.noticed():
            pass
        record = parse(memory.tobytes())
        assert record.state is RankState.FAILED and record.text == "ShapeError: wrong"
        made.check()
    else:
        while not made.failures:
            made.poll()
        assert made.failures == {10: "ShapeError: wrong"} and not made.failed
        with pytest.raises(PeerFailedError, match=r"rank 10 failed: ShapeError: wrong$") as raised:
            made.check()
        assert (raised.value.rank, raised.value.cause) == (10, "ShapeError: wrong")
        with pytest.raises(PeerFailedError, match=rf"; rank {made.rank} waited for rank 10 to send"):
            made.check(lambda: WaitReason((10,), "to send"))
    assert made.in_vain


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_heard_is_passed_on(notices, comm):
    made, _ = notices
    if comm.rank == 0:
        made.failures[11] = "silent"
        made.pass_on()
        made.pass_on()
        while not made.noticed():
            pass
    elif comm.rank > 1:
        while not made.failures:
            made.poll()
        assert made.failures == {11: "silent"}


def test_a_cause_is_one_line():
    assert cause_of(ShapeError("first\nsecond")) == "ShapeError: first"
    assert cause_of(KeyboardInterrupt()) == "KeyboardInterrupt"

    class Speechless(Exception):
        def __str__(self):
            raise ValueError

    assert cause_of(Speechless()) == "Speechless"

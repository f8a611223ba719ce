"""Reading the headers of other ranks, near and far."""

import os
import time
from types import SimpleNamespace

import pytest

from distdl_rma.segments.waiting.header import RankState
from distdl_rma.segments.waiting.peer_headers import PeerHeaders

pytestmark = pytest.mark.mpi


def test_what_a_rank_says_is_read_wherever_it_is(segments, comm):
    headers = PeerHeaders(segments.segment)
    segments.begin(segments.operation(f"step of {comm.rank}"), 5)
    comm.Barrier()
    for rank in segments.ranks:
        record = headers.read(rank, time.monotonic() + 10)
        assert record.operation == f"step of {rank}" and record.epoch == 5
        assert record.state is RankState.RUNNING
        assert headers.glance(rank).operation == record.operation
        assert headers.age(rank) < 10 and not headers.process_is_gone(rank, record)
    # Gets under way end before the segment may go.
    while headers._asked:
        for rank in tuple(headers._asked):
            headers._hear(rank)
    comm.Barrier()


def test_who_never_answered_is_silent(segments):
    headers = PeerHeaders(segments.segment)
    far = [rank for rank in segments.ranks if not headers.is_near(rank)]
    assert all(headers.age(rank) == float("inf") for rank in far)
    assert all(headers.age(rank) == 0 for rank in segments.ranks if rank not in far)


def test_who_says_the_same_for_a_while_is_unchanged_only_while_it_waits(segments):
    headers, me = PeerHeaders(segments.segment), segments.rank
    waits = SimpleNamespace(written=1.0, state=RankState.WAITING, process=os.getpid(), namespace=0)
    assert headers.unchanged(me, waits) == 0
    time.sleep(0.01)
    assert headers.unchanged(me, waits) >= 0.01
    waits.state = RankState.RUNNING
    assert headers.unchanged(me, waits) == 0
    waits.state, waits.written = RankState.WAITING, 2.0
    assert headers.unchanged(me, waits) == 0
    # Without a namespace nothing is known of a process.
    assert not headers.process_is_gone(me, waits)

"""The memory that all ranks registered: one block each, by load and store or by puts."""

import os
import time

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma import Machine
from distdl_rma.errors import SegmentError
from distdl_rma.segments.options import SegmentOptions
from distdl_rma.segments.transport import segment as segment_module
from distdl_rma.segments.transport.links import MOVING_WORD, ByteRuns, RemoteLink, SharedLink
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.trace import Counters

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["auto", "remote"])
def made(request, comm):
    """A small segment of all ranks, whose ids are not their positions, and these ids."""
    own, ranks = comm.Dup(), tuple(10 * position + 3 for position in range(comm.size))
    segment = Segment(own, ranks, SegmentOptions("64KiB", transport=request.param), Counters())
    yield segment, ranks, request.param
    own.Barrier()
    segment.close()
    own.Free()


def move(segment, rank, way, begin, data):
    """Put or get bytes, by load and store where that can be."""
    link = segment.link(rank)
    request = getattr(link, way)(ByteRuns((begin,), data.size), data) if link.memory is None else None
    if request is None:
        there = link.memory[begin : begin + data.size]
        np.copyto(*((there, data) if way == "put" else (data, there)))
    link.close_delivery()
    while not (segment.progress() and (request is None or request.Test())):
        os.sched_yield()


def test_every_rank_reaches_every_block_by_its_id_and_no_other(made, comm):
    segment, ranks, _ = made
    segment.memory[:], segment.memory[:8] = 0, 255
    comm.Barrier()
    for rank in ranks:
        move(segment, rank, "put", 64 * (1 + comm.rank), np.full(64, comm.rank + 1, np.uint8))
    comm.Barrier()
    segment.acquire()
    blocks = segment.memory[64 : 64 * (1 + comm.size)].reshape(comm.size, 64)
    assert (blocks == np.arange(1, comm.size + 1)[:, None]).all() and (segment.memory[:8] == 255).all()
    assert not segment.memory[64 * (1 + comm.size) :].any()
    back = np.zeros((comm.size, 64), np.uint8)
    for at, rank in enumerate(ranks):
        move(segment, rank, "get", 64 * (1 + at), back[at])
    assert (back == np.arange(1, comm.size + 1)[:, None]).all()


def test_memory_is_zero_whatever_was_in_that_of_segments_before(comm):
    for size in ("64KiB", "8MiB", "8MiB", "8MiB", "64KiB"):
        segment = Segment(comm, tuple(range(comm.size)), SegmentOptions(size), Counters())
        assert not segment.memory.any()
        segment.memory[:] = 255
        comm.Barrier()
        segment.close()


def test_words_and_bytes_are_one_memory_that_begins_on_a_line(made):
    segment, _, _ = made
    assert segment.nbytes >= 64 << 10 and segment.memory.nbytes == segment.nbytes == 8 * len(segment.words)
    assert segment.memory.ctypes.data % 64 == 0 and segment.unified
    segment.words[5] = 1 << 40
    assert segment.memory[40:48].view(np.int64)[0] == 1 << 40


def test_ways_are_those_of_the_transport(made, comm):
    segment, ranks, transport = made
    me = ranks[comm.rank]
    assert isinstance(segment.link(me), SharedLink) and segment.link(me).memory is not None
    assert sorted(rank for node in segment.nodes for rank in node) == sorted(ranks)
    if transport == "remote":
        assert all(isinstance(segment.link(rank), RemoteLink) for rank in ranks if rank != me)
        assert segment.direct_nodes == tuple((rank,) for rank in ranks) and not segment.arenas
    else:
        assert segment.direct_nodes == segment.nodes
        assert all((segment.link(rank).memory is not None) == (rank in segment.node_ranks) for rank in ranks)
    assert segment.has_remote == any(isinstance(segment.link(rank), RemoteLink) for rank in ranks)
    with pytest.raises(KeyError):
        segment.link(1)


@pytest.mark.processes
def test_a_size_that_the_node_does_not_have_is_refused_on_all_ranks_and_nothing_is_kept(comm):
    own = comm.Dup()
    for _ in range(2):
        words = r"not enough shared memory: \d+ bytes .* wanted, \d+ bytes free .*SEGMENT_SIZE"
        with pytest.raises(SegmentError, match=words):
            Segment(own, tuple(range(comm.size)), SegmentOptions("100TiB"), Counters())
    Segment(own, tuple(range(comm.size)), SegmentOptions("64KiB"), Counters()).close()
    own.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["put", "get"])
def test_both_ends_know_of_a_large_transfer_between_nodes_until_it_is_over(comm, way, monkeypatch):
    monkeypatch.setattr(segment_module, "_AFTER_SECONDS", 0)
    with Machine(comm, segment_size="16MiB", transport="remote", progress="none", timeout=60) as machine:
        segment, queue = machine.segments.segment, machine.segments.queue()
        buffer = machine.segments.get_segment_buffer(8 << 20)
        remotes = buffer.exchange([rank for rank in machine.ranks if rank != machine.rank])
        deadline, told = time.monotonic() + 60, []

        def wait_for(nbytes):
            while segment.moving != nbytes and time.monotonic() < deadline:
                machine.segments.progress()
            assert (segment.moving, segment.keep_moving()) == (nbytes, nbytes > 0)
            machine.group().barrier()

        if comm.rank == 0:
            link = segment.link(1)
            tell, link._tell = link._tell, lambda nbytes: (told.append(nbytes), tell(nbytes))
            # Small ones count together, as long as they are under way.
            for nbytes in (*[100 << 10] * 3, 8 << 20):
                getattr(remotes[1], way)(np.zeros(nbytes, np.uint8), queue=queue)
                assert segment.moving == sum(told)
            assert told == [300 << 10, 8 << 20]
            queue.wait()
        wait_for(0)
        assert told[2:] == ([-(300 << 10) - (8 << 20)] if comm.rank == 0 else [])
        if comm.rank == 0:
            for _ in range(3):
                getattr(remotes[1], way)(np.zeros(100 << 10, np.uint8), queue=queue)
                queue.wait()
                while not segment.progress():
                    pass
            assert len(told) == 3
        for nbytes in (8 << 20, -(8 << 20)):
            if comm.rank == 0:
                link._send_words(MOVING_WORD, [nbytes], MPI.SUM)
            wait_for(max(nbytes, 0) if comm.rank == 1 else 0)


@pytest.mark.parametrize("made", ["remote"], indirect=True)
def test_a_transfer_whose_end_nobody_tells_is_believed_for_a_while(made, monkeypatch):
    segment, now = made[0], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    segment.words[MOVING_WORD] = 64 << 20
    for seconds, moves in ((0, True), (4, True), (2, False), (50, False)):
        now[0] += seconds
        assert segment.keep_moving() == moves
    segment.words[MOVING_WORD] += 1
    assert segment.keep_moving()
    # A notification follows.
    segment.words[MOVING_WORD] = 0
    assert segment.keep_moving()
    now[0] += 0.01
    assert not segment.keep_moving()

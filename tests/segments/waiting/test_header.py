"""Headers: what a rank says about itself can be read at any moment, and is never a mixture of two records."""

import contextlib
import itertools
import os
import random
import struct
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from distdl_rma.segments.waiting.header import (
    HEADER_BYTES,
    DoubleRecord,
    HeaderRecord,
    HeaderWriter,
    PeerHeaders,
    RankState,
    WaitReason,
    operation_name,
    parse,
    record_text,
)


def written(count):
    """Headers after each of so many records, each unlike the others in all of its fields."""
    header = bytearray(HEADER_BYTES)
    board = HeaderWriter(memoryview(header), lambda: None)
    copies = [bytes(header)]
    for k in range(count):
        board.write(list(RankState)[k % 4], f"to send in {k} " * (1 + 7 * k % 40), tuple(range(k % 11)))
        copies.append(bytes(header))
        board.begin(operation_name(f"layer {k} " * (1 + 5 * k % 30)), 1000 + k)
        copies.append(bytes(header))
    return copies


def test_record_that_is_torn_anywhere_reads_as_the_one_before_or_the_one_after():
    copies = written(6)
    for before, after in itertools.pairwise(copies):
        records = parse(before), parse(after)
        changed = [place for place in range(HEADER_BYTES) if before[place] != after[place]]
        # The writer is gone once some of the bytes have changed, from the front or from the back.
        for places in (changed, changed[::-1]):
            mixed = bytearray(before)
            for place in places:
                assert parse(bytes(mixed)) in records
                mixed[place] = after[place]


@pytest.mark.parametrize("seed", range(20))
def test_record_that_is_read_while_words_change_in_any_order_is_no_mixture(seed):
    # Several records may be written during one slow copy: then there may be none to read, or one of them.
    draw = random.Random(seed)
    copies = written(4)
    whole = [parse(copy) for copy in copies]
    states = {(r.state, r.text, r.waits_for, r.since) for r in whole}
    operations = {(r.operation, r.epoch, r.operation_since) for r in whole}
    for _ in range(300):
        mixed = b"".join(draw.choice(copies)[at : at + 8] for at in range(0, HEADER_BYTES, 8))
        record = parse(mixed)
        if record is not None:
            assert (record.state, record.text, record.waits_for, record.since) in states
            assert (record.operation, record.epoch, record.operation_since) in operations


def test_header_that_cannot_be_read_is_given_up_at_once():
    header = np.zeros(HEADER_BYTES, np.uint8)
    struct.pack_into("=q", header.data, 0, 7)
    segment = SimpleNamespace(link=lambda rank: SimpleNamespace(memory=header))
    begin = time.monotonic()
    assert PeerHeaders(segment).read(1, deadline=begin + 1e9) is None
    assert time.monotonic() - begin < 20


def test_the_newest_record_is_read_and_nothing_else_is_touched_and_zeros_are_none():
    record, calls = DoubleRecord("q", 16, text=8), []
    memory = bytearray(record.end + 8)
    assert record.read(bytes(memory)) is None and parse(bytes(HEADER_BYTES)) is None
    for count in range(1, 6):
        record.write(record_text("words", 8), memoryview(memory), count, lambda: calls.append(1), 9 + count)
        assert record.read(bytes(memory)) == ("words", 9 + count) and len(calls) == count
        assert not any(memory[:16]) and not any(memory[record.end :])


@pytest.mark.mpi
def test_what_a_rank_says_is_read_wherever_it_is(segments, comm):
    headers = PeerHeaders(segments.segment)
    segments.begin(segments.operation(f"step of {comm.rank}"), 5)
    comm.Barrier()
    for rank in segments.ranks:
        record = headers.read(rank, time.monotonic() + 60)
        assert record.operation == f"step of {rank}" and record.epoch == 5
        assert record.state is RankState.RUNNING
        assert headers.glance(rank).operation == record.operation
        assert headers.age(rank) < 60 and not headers.process_has_ended(rank, record)
    # Gets under way end before the segment may go.
    while headers._asked:
        for rank in tuple(headers._asked):
            headers._poll_answer(rank)
    comm.Barrier()


@pytest.mark.mpi
def test_who_never_answered_is_silent(segments):
    headers = PeerHeaders(segments.segment)
    far = [rank for rank in segments.ranks if not headers.is_near(rank)]
    assert all(headers.age(rank) == float("inf") for rank in far)
    assert all(headers.age(rank) == 0 for rank in segments.ranks if rank not in far)


@pytest.mark.mpi
def test_who_says_the_same_for_a_while_is_unchanged_only_while_it_waits(segments):
    headers, me = PeerHeaders(segments.segment), segments.rank
    waits = HeaderRecord(RankState.WAITING, os.getpid(), 0, 1.0, 1.0, -1, (), "", "", 0, 0.0)
    assert headers.unchanged(me, waits) == 0
    time.sleep(0.01)
    assert headers.unchanged(me, waits) >= 0.01
    assert headers.unchanged(me, replace(waits, state=RankState.RUNNING)) == 0
    assert headers.unchanged(me, replace(waits, written=2.0)) == 0
    # Without a namespace nothing is known of a process.
    assert not headers.process_has_ended(me, waits)


@pytest.mark.parametrize(
    ("ranks", "whom"),
    [
        ((3,), "rank 3"),
        ((1, 2), "ranks 1, 2"),
        ((), "the other ranks"),
        (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."),
    ],
)
def test_a_reason_names_the_ranks_and_what_they_are_to_do(ranks, whom):
    assert str(WaitReason(tuple(ranks), "to send in 'enc1'", "a hint")) == f"for {whom} to send in 'enc1'"


def test_a_rank_that_waits_for_ranks_that_it_does_not_know_says_so():
    waits = HeaderRecord(RankState.WAITING, 1, 0, 1.0, 1.0, -1, (), "to set notification 0", "", 0, 0.0)
    assert waits.doing.endswith("s for the other ranks to set notification 0")


@pytest.mark.mpi
@pytest.mark.sizes(1)
def test_who_is_lost_to_the_network_is_silent():
    from mpi4py import MPI

    def lost(*arguments):
        raise MPI.Exception(MPI.ERR_OTHER)

    link = SimpleNamespace(memory=None, get=lost)
    headers = PeerHeaders(
        SimpleNamespace(
            lock=contextlib.nullcontext(), link=lambda rank: link, hand_over=None, keep_moving=bool
        )
    )
    assert headers.glance(1) is None and headers.read(1, time.monotonic() + 0.01) is None
    assert headers.age(1) == float("inf")

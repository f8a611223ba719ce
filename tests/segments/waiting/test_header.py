"""Headers: what a rank says about itself can be read at any moment, and is never a mixture of two records."""

import itertools
import random
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest

from distdl_rma.segments.waiting.double_record import DoubleRecord
from distdl_rma.segments.waiting.header import HEADER_BYTES, HeaderWriter, RankState, operation_name, parse
from distdl_rma.segments.waiting.peer_headers import PeerHeaders


class Struck(Exception):
    """The writer is gone."""


class Torn:
    """Memory whose writer is gone once so many bytes have changed, from the front or from the back."""

    def __init__(self, before, after, changed, forward):
        places = range(len(before)) if forward else reversed(range(len(before)))
        self.mixed = bytearray(before)
        for place in [k for k in places if before[k] != after[k]][:changed]:
            self.mixed[place] = after[place]


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
        for forward in (True, False):
            for changed in range(sum(a != b for a, b in zip(before, after, strict=True))):
                assert parse(bytes(Torn(before, after, changed, forward).mixed)) in records


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


def test_memory_that_was_never_written_is_no_record():
    assert parse(bytes(HEADER_BYTES)) is None


def test_record_of_a_writer_that_stops_midway_leaves_the_one_before(monkeypatch):
    header = bytearray(HEADER_BYTES)
    board = HeaderWriter(memoryview(header), lambda: None)
    board.write(RankState.WAITING, "to send in 'enc1'", (3,))

    class Form:
        def __init__(self, form):
            self._form = form

        def pack_into(self, memory, at, *fields):
            self._form.pack_into(memory, at, *fields)
            raise Struck

        def __getattr__(self, name):
            return getattr(self._form, name)

    from distdl_rma.segments.waiting import header as status

    monkeypatch.setattr(status._STATE, "_form", Form(status._STATE._form))
    with pytest.raises(Struck):
        board.write(RankState.FAILED, "disk on fire")
    record = parse(bytes(header))
    assert (
        record.state is RankState.WAITING and record.text == "to send in 'enc1'" and record.waits_for == (3,)
    )


def test_header_that_cannot_be_read_is_given_up_at_once():
    header = np.zeros(HEADER_BYTES, np.uint8)
    struct.pack_into("=q", header.data, 0, 7)
    segment = SimpleNamespace(link=lambda rank: SimpleNamespace(memory=header))
    begin = time.monotonic()
    assert PeerHeaders(segment).read(1, deadline=begin + 1e9) is None
    assert time.monotonic() - begin < 20


def test_newer_of_two_whole_records_counts():
    twin, memory = DoubleRecord("q", 0), memoryview(bytearray(64))
    for count in range(1, 6):
        twin.write(memory, count, lambda: None, 10 * count)
        assert twin.read(bytes(memory)) == (10 * count,)

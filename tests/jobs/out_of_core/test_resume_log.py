"""Messages between slabs on disk: which are kept, and which a later process finds."""

import numpy as np
import pytest

from distdl_rma.jobs.out_of_core import resume_log
from distdl_rma.jobs.out_of_core.resume_log import ResumeLog
from distdl_rma.segments.mailbox import Address, Message


def message(number, pieces=2):
    arrays = [np.full((number + 1, 3), number, np.int32), np.array([number], np.float64)][:pieces]
    return Message(arrays, (number * 7, "int32"))


def keep(log, sender, receiver, number=0, channel="conv", sample=0):
    log.keep(sample, Address(channel, sender, receiver), message(number))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_slab_finds_the_messages_of_those_before_it_in_their_order(tmp_path):
    log = ResumeLog(tmp_path)
    keep(log, 0, 1, 1)
    for number in (2, 3):
        keep(log, 1, 2, number)
    keep(log, 0, 3, 4, "other")
    keep(log, 2, 3, 5)
    # To a slab before it, and of another sample.
    keep(log, 3, 2, 6)
    found = ResumeLog(tmp_path).read(0, 2)
    wanted = [(Address("other", 0, 3), 4), (Address("conv", 1, 2), 2), (Address("conv", 1, 2), 3)]
    assert [address for address, _ in found] == [address for address, _ in wanted]
    for (_, one), (_, number) in zip(found, wanted, strict=True):
        assert one.kind == message(number).kind
        for piece, expected in zip(one.pieces, message(number).pieces, strict=True):
            assert piece.dtype == expected.dtype and np.array_equal(piece, expected)
    # Slab 2 sends again.
    assert files(tmp_path) == ["0-0-3.messages", "0-1-2.messages"]
    assert ResumeLog(tmp_path).read(1, 2) == [] and files(tmp_path) == []


def test_what_is_not_needed_any_more_is_removed(tmp_path):
    log = ResumeLog(tmp_path)
    for sender in range(4):
        keep(log, sender, sender + 1)
    log.forget(0, 3)
    assert files(tmp_path) == ["0-2-3.messages", "0-3-4.messages"]
    again = ResumeLog(tmp_path)
    again.read(0, 3)
    again.forget(0, 4)
    assert files(tmp_path) == []
    keep(again, 3, 4)
    again.clear()
    assert files(tmp_path) == [] and again.has_all_for(4)


def test_a_message_that_was_being_written_is_one_of_a_slab_that_is_computed_again(tmp_path):
    log = ResumeLog(tmp_path)
    keep(log, 0, 1)
    keep(log, 1, 2, 9)
    torn = tmp_path / "0-1-2.messages"
    torn.write_bytes(torn.read_bytes()[:-5])
    again = ResumeLog(tmp_path)
    assert len(again.read(0, 1)) == 1
    keep(again, 1, 2, 9)
    assert len(ResumeLog(tmp_path).read(0, 2)) == 1


def test_a_file_that_is_torn_or_damaged_is_an_error(tmp_path):
    keep(ResumeLog(tmp_path), 0, 1)
    file = tmp_path / "0-0-1.messages"
    whole = file.read_bytes()
    for at in range(len(whole)):
        for changed in (whole[:at], whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]):
            file.write_bytes(changed)
            # An empty file has no message.
            if changed:
                with pytest.raises((ValueError, TypeError)):
                    ResumeLog(tmp_path).read(0, 1)


def test_a_slow_disk_leaves_receivers_out(tmp_path, monkeypatch):
    monkeypatch.setattr(resume_log, "_QUICK_SECONDS", 0.0)
    monkeypatch.setattr(resume_log, "_SHARE", 0.0)
    log = ResumeLog(tmp_path)
    keep(log, 0, 1)
    keep(log, 0, 3)
    keep(log, 1, 2)
    monkeypatch.setattr(resume_log, "_SHARE", 1e9)
    keep(log, 2, 3)
    keep(log, 3, 4)
    # Slab 1 has its messages; but slab 3 lacks those of slab 0.
    assert [log.has_all_for(slab) for slab in range(6)] == [True, False, False, False, True, True]
    assert files(tmp_path) == ["0-0-1.messages", "0-3-4.messages"]

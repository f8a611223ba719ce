"""Whom a wait gives up, and whom a close misses, on a node of many ranks that are played in one process."""

import os
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from distdl_rma.errors import ExchangeTimeout, PeerFailedError
from distdl_rma.segments.waiting import error_texts, liveness
from distdl_rma.segments.waiting.error_texts import ends_with_state
from distdl_rma.segments.waiting.header import HEADER_BYTES, HeaderWriter, RankState, WaitReason, parse
from distdl_rma.segments.waiting.liveness import FailureNotices, PeerWatch

RANKS = tuple(range(20))


def board(memory):
    return HeaderWriter(memory.data, lambda: None)


@pytest.fixture
def node(monkeypatch):
    """What rank 0 sees of 20 ranks of its node, and their boards."""
    monkeypatch.setattr(liveness, "_SUSPICION_SECONDS", -1.0)
    memories = {rank: np.zeros(HEADER_BYTES, np.uint8) for rank in RANKS}
    segment = SimpleNamespace(
        memory=memories[0],
        fence=lambda: None,
        lock=threading.RLock(),
        node_ranks=RANKS,
        hand_over=None,
        moving=0,
        keep_moving=bool,
        link=lambda rank: SimpleNamespace(memory=memories[rank], moving=0),
    )
    header = board(memories[0])
    notices = FailureNotices(SimpleNamespace(rank=0), RANKS, segment.lock, header)
    watch = PeerWatch(segment, RANKS, header, notices)
    return watch, {rank: board(memories[rank]) for rank in RANKS[1:]}, memories


def ended():
    """Number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def leave(boards, *ranks):
    for rank in ranks:
        boards[rank].write(RankState.LEFT, "closing the machine")


def look(watch, waiting):
    """As a long wait does."""
    for _ in range(10):
        watch.look(waiting)


def give_up(watch, seconds):
    reason = WaitReason(watch.missing(), "to close the machine", leavers=True)
    raise ExchangeTimeout(watch.timeout_message(reason, seconds))


def test_wait_for_any_of_many_ranks_is_in_vain_once_all_have_left_and_none_has_come_back(node):
    watch, boards, _ = node
    # This rank is among them: it notifies itself never while it waits.
    waiting = WaitReason(RANKS, "to set notification 0", anyone=True)
    leave(boards, *RANKS[1:-1])
    look(watch, waiting)
    boards[3].write(RankState.RUNNING)
    look(watch, waiting)
    leave(boards, 19)
    look(watch, waiting)
    # The header of this process is that of one that lives.
    assert boards[1]._process == os.getpid() and watch.ended() == []
    leave(boards, 3)
    with pytest.raises(PeerFailedError, match="rank 1 failed: it left, closing the machine"):
        look(watch, waiting)


@pytest.mark.parametrize("anyone", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 15, 19])
def test_process_that_ended_is_noticed_wherever_it_stands_among_many(node, rank, anyone):
    watch, boards, _ = node
    boards[rank]._process = ended()
    boards[rank].write(RankState.RUNNING)
    with pytest.raises(PeerFailedError, match=f"rank {rank} failed: it is silent, its process .* has ended"):
        look(watch, WaitReason(RANKS, "to send in 'enc1'", anyone=anyone))


def test_close_misses_first_those_that_ended_then_those_that_have_not_left(node):
    watch, boards, _ = node
    watch.leave("closing the machine")
    leave(boards, *RANKS[1:])
    assert watch.missing() == ()
    boards[4].write(RankState.RUNNING)
    boards[17]._process = ended()
    leave(boards, 17)
    assert watch.missing() == (17, 4)
    assert [rank for rank, _ in watch.ended()] == [17]
    with pytest.raises(PeerFailedError, match="rank 17 failed: it is silent"):
        look(watch, WaitReason(watch.missing(), "to close the machine", leavers=True))


def test_close_misses_a_rank_that_left_and_does_not_say_so_any_more(node, monkeypatch):
    watch, boards, _ = node
    for module in (liveness, error_texts):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    leave(boards, *RANKS[1:])
    assert watch.missing() == ()
    time.sleep(0.6)
    leave(boards, *RANKS[1:-1])
    assert watch.missing() == (19,)
    silence = (
        r"for rank 19 to close the machine; rank 19 left .*, closing the machine, and has said nothing for"
    )
    with pytest.raises(ExchangeTimeout, match=silence):
        give_up(watch, 6.0)


def test_chain_tells_of_a_rank_that_waits_and_does_not_say_so_any_more(node, monkeypatch):
    watch, boards, _ = node
    monkeypatch.setattr(error_texts, "ANSWER_SECONDS", 0.05)
    waiting = WaitReason((1, 2), "to set notification 0")
    boards[1].write(RankState.WAITING, "to answer", (2,))
    boards[2].write(RankState.RUNNING)
    watch.look(waiting)
    time.sleep(0.1)
    # A rank that computes writes nothing; one that waits does so ten times a second.
    asked = watch._headers, watch.rank, waiting, 1.0
    first, second = error_texts.chain(*asked)
    assert "for rank 2 to answer, and has said nothing for" in first
    assert second.startswith("rank 2 waits for nobody") and "has said" not in second
    boards[1].write(RankState.WAITING, "to answer", (2,))
    assert not any(
        "has said" in clause for clause in error_texts.chain(watch._headers, watch.rank, waiting, 1.0)
    )


def test_process_that_was_seen_to_have_ended_is_told_of_when_its_header_cannot_be_read_any_more(node):
    watch, boards, memories = node
    boards[4]._process = ended()
    boards[4].write(RankState.RUNNING)
    with pytest.raises(PeerFailedError, match="rank 4 failed: it is silent"):
        look(watch, WaitReason((4,), "to send in 'enc1'"))
    memories[4][:] = 0
    assert [rank for rank, _ in watch.ended()] == [4]


def test_rank_whose_call_raised_is_waited_for_in_vain_unless_it_raised_here_too(node):
    watch, boards, memories = node
    waiting = WaitReason((4,), "to send in 'sum'")
    boards[4].write(RankState.RAISED, "ShapeError: wrong", (1,))
    watch.announce_error("ShapeError: wrong too")
    assert parse(memories[0].tobytes()).doing.endswith("ago: ShapeError: wrong too")
    look(watch, waiting)
    watch.resume()
    assert parse(memories[0].tobytes()).state is RankState.RUNNING and not watch.has_raised
    boards[4].write(RankState.RAISED, "IndexError: once more", (2,))
    with pytest.raises(
        PeerFailedError, match="rank 4 failed: IndexError: once more; rank 0 waited for rank 4"
    ):
        look(watch, waiting)


@pytest.mark.parametrize("state", [RankState.SETTLING, RankState.FAILED])
def test_error_is_of_the_rank_that_it_began_on_whoever_passes_it_on(node, state):
    watch, boards, _ = node
    boards[4].write(state, "IndexError: wrong", (0,), origin=5)
    with pytest.raises(PeerFailedError, match="rank 5 failed: IndexError: wrong; rank 0 waited for rank 4"):
        look(watch, WaitReason((4,), "to send in 'sum'"))


def test_rank_that_settles_an_error_is_waited_for_in_vain_unless_this_one_does_so_too(node):
    watch, boards, memories = node
    waiting = WaitReason((4,), "to send in 'sum'")
    boards[4].write(RankState.SETTLING, "MismatchError: another plan", (7,))
    with pytest.raises(PeerFailedError, match="rank 4 failed: MismatchError: another plan") as caught:
        look(watch, waiting)
    # It can go on: nobody has failed.
    assert not watch._notices.any_failed and not ends_with_state(caught.value)
    # Others wait for this rank, which waits for a third.
    boards[4].write(RankState.RUNNING)
    look(watch, waiting)
    watch.end_wait()
    boards[5].write(RankState.SETTLING, "MismatchError: another plan", (0, 7))
    with pytest.raises(PeerFailedError, match="rank 5 failed: MismatchError: another plan"):
        _ = [look(watch, waiting) for _ in range(2)]
    watch.settle("MismatchError: another plan", 5)
    look(watch, WaitReason((4, 5), "to reach 'ranks that raise'"))
    record = parse(memories[0].tobytes())
    assert record.state is RankState.SETTLING and record.waits_for == (4, 5) and record.origin == 5
    watch.end_wait()
    assert parse(memories[0].tobytes()).state is RankState.SETTLING
    watch.resume()
    assert parse(memories[0].tobytes()).state is RankState.RUNNING


def test_ranks_that_wait_for_each_other_in_step_give_up(node):
    watch, boards, _ = node
    waiting = WaitReason((4,), "to send in 'roll'", in_step=True)
    boards[4].write(RankState.WAITING_IN_STEP, "to connect 'sum'", (7, 5))
    boards[5].write(RankState.WAITING_IN_STEP, "to send in 'roll'", (0,))
    # This rank may be sent something by others than those that it waits for; and some wait no longer.
    look(watch, WaitReason((4,), "to set notification 0", anyone=True))
    watch.end_wait()
    for _ in range(20):
        watch.look(waiting)
        boards[5].write(RankState.RUNNING)
        boards[5].write(RankState.WAITING_IN_STEP, "to send in 'roll'", (0,))
    watch.end_wait()
    boards[5].write(RankState.WAITING, "to send in 'roll'", (0,))
    look(watch, waiting)

    def say(*ranks):
        for _ in range(20):
            for rank, text, waits_for in ((4, "to connect 'sum'", (7, 5)), (5, "to send in 'roll'", (0,))):
                if rank in ranks:
                    boards[rank].write(RankState.WAITING_IN_STEP, text, waits_for)
            watch.look(waiting)

    # What a rank that does not run said long ago may not be so any more.
    say(5)
    look(watch, waiting)
    with pytest.raises(ExchangeTimeout, match=r"rank 4 waits .* they wait for each other"):
        say(4, 5)


def test_ranks_that_left_still_take_puts(node):
    watch, boards, _ = node
    leave(boards, 1)
    look(watch, WaitReason((1,), "to take its last puts", leavers=True))
    with pytest.raises(PeerFailedError, match="it left"):
        look(watch, WaitReason((1,), "to send in 'enc1'"))


def test_rank_of_another_node_that_left_and_answers_no_more_is_missed_at_a_close(node, monkeypatch):
    watch, _, memories = node
    answers = [True]

    def get(runs, out, *, keep=False):
        out[:] = memories[1]
        return SimpleNamespace(Test=lambda: answers[0])

    near = watch._segment.link
    far = SimpleNamespace(memory=None, get=get, moving=0)
    watch._segment.link = lambda rank: far if rank == 1 else near(rank)
    watch._segment.node_ranks = RANKS[2:]
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.05)
    boards = {rank: board(memories[rank]) for rank in RANKS[1:]}
    leave(boards, *RANKS[1:])
    assert watch.missing() == ()
    answers[0] = False
    watch._headers._answers[1] = watch._headers._answers[1][0], -1e9
    assert watch.missing() == (1,)
    with pytest.raises(ExchangeTimeout, match=r"rank 0 waited 6 s for rank 1 to close .*; rank 1 is silent"):
        give_up(watch, 5.99)


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
        assert not made.any_failed
        made.send("ShapeError: wrong")
        made.send("never said")
        made.wait_until_noticed(60)
        assert made.noticed()
        record = parse(memory.tobytes())
        assert record.state is RankState.FAILED and record.text == "ShapeError: wrong"
        # It would wait for what the others send no more.
        with pytest.raises(PeerFailedError, match=r"rank 10 failed: ShapeError: wrong; rank 10 waited"):
            made.check(lambda: WaitReason((11,), "to send"))
    else:
        while not made.failures:
            made.poll()
        assert made.failures == {10: "ShapeError: wrong"} and not made.failed
        with pytest.raises(
            PeerFailedError, match=r"rank 10 failed: ShapeError: wrong\. The machine is lost"
        ) as raised:
            made.check()
        assert (raised.value.rank, raised.value.cause) == (10, "ShapeError: wrong")
        with pytest.raises(PeerFailedError, match=rf"; rank {made.rank} waited for rank 10 to send"):
            made.check(lambda: WaitReason((10,), "to send"))
    assert made.any_failed


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

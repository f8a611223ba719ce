"""Lines that all processes of a job can read, and the communicator that is created after them.

Ranks that mean different machines, are refused or do not come are in ``tests/segments/test_machine.py``.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma import Machine
from distdl_rma.segments.waiting import meeting
from distdl_rma.segments.waiting.liveness import FailureNotices
from distdl_rma.segments.waiting.meeting import Announcement, JobBoard, Refusal, Stage, shortened


@pytest.fixture
def board(comm):
    made = JobBoard()
    if not made.usable():
        pytest.skip("the launcher keeps nothing")
    yield made
    comm.Barrier()
    made.write("")
    comm.Barrier()


@pytest.mark.mpi
@pytest.mark.processes
def test_everyone_reads_what_a_process_said_last(board, comm):
    for line in (f"first of {comm.rank}", f"é\n{comm.rank}"):
        board.write(line)
        comm.Barrier()
        for rank in range(comm.size):
            assert board.read(rank) == line.replace(str(comm.rank), str(rank))
        comm.Barrier()
    board.write("")
    comm.Barrier()
    assert [board.read(rank) for rank in range(comm.size)] == [""] * comm.size


@pytest.mark.mpi
@pytest.mark.processes
def test_a_line_is_cut_where_the_launcher_takes_no_more(board, comm):
    board.write("x" * 10_000)
    assert board.read(comm.rank) == "x" * meeting._LONGEST


def test_nothing_is_looked_up_where_slurm_answers_and_mpich_misreads_it(monkeypatch):
    asked = []

    def tried(board):
        asked.append(board)
        return True

    monkeypatch.setattr(JobBoard, "_tried", tried)
    for name in ("MPI_LOCALNRANKS", "SLURM_JOB_ID", "PMI_FD"):
        monkeypatch.delenv(name, raising=False)
    assert JobBoard().usable()
    for name in ("SLURM_JOB_ID", "PMI_FD"):
        monkeypatch.setenv(name, "11")
    assert not JobBoard().usable() and len(asked) == 1
    # An mpiexec within the job of Slurm.
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert JobBoard().usable()


@pytest.mark.parametrize("found", ["-", UnicodeDecodeError("utf-8", b"\x89", 0, 1, "invalid start byte")])
def test_a_name_that_is_found_though_nobody_published_it_makes_the_board_useless(found, monkeypatch):
    lines = []

    def read(board, rank):
        if lines[-1] or found == "-":
            return "-"
        raise found

    monkeypatch.setattr(JobBoard, "write", lambda board, line: lines.append(line))
    monkeypatch.setattr(JobBoard, "read", read)
    for name in ("SLURM_JOB_ID", "PMI_FD"):
        monkeypatch.delenv(name, raising=False)
    assert not JobBoard().usable()
    assert lines == ["-", ""]


RANKS = st.frozensets(st.integers(0, 40), max_size=12)
WORDS = st.text(st.characters(codec="ascii", exclude_categories=("C", "Z")), max_size=30)


@given(
    line=st.builds(
        Announcement,
        st.sampled_from(Stage),
        st.builds(Refusal().followed_by, RANKS, WORDS, st.integers(0, 99)),
        st.integers(0, 1 << 56),
        st.integers(0, 99),
        st.integers(-1, 40),
        st.sampled_from((0.0, 0.5, 300.0, float("inf"))),
        RANKS,
        WORDS,
    )
)
def test_an_announcement_is_read_as_it_was_written(line):
    assert Announcement.parsed(line.encoded()) == line


@given(st.text(max_size=80))
def test_other_lines_are_no_announcement(line):
    assert Announcement.parsed(line) is None or line.count("\n") >= 9


def test_a_list_too_long_for_a_line_names_nobody():
    members = frozenset(range(0, 200, 2))
    refusal = Refusal().followed_by(members, "x" * 999)
    line = Announcement(Stage.HERE, refusal, members=members)
    found = Announcement.parsed(line.encoded())
    assert not found.members and not found.last.members and len(found.last.text) < 200
    assert not found.waits_for(2) and line.waits_for(2)
    assert Refusal().followed_by(frozenset(range(1000)), "").members == frozenset(range(1000))


def test_who_waits_is_waited_for_by_the_first_and_by_the_members():
    waits = Announcement(Stage.HERE, Refusal(), first=3, members=frozenset({4}))
    assert [waits.waits_for(rank) for rank in (3, 4, 5)] == [True, True, False]
    assert not Announcement(Stage.GOES, Refusal(), first=3).waits_for(3)


def test_clauses_say_what_a_process_does():
    assert Announcement(Stage.HERE, Refusal(), text="(0, 1)").doing == "makes a machine of M = (0, 1)"
    assert Announcement(Stage.LEFT, Refusal(), text="gave up after 2 s").doing == "gave up after 2 s"
    assert Announcement(Stage.REFUSED, Refusal(1, frozenset(), "no")).doing == "was refused: no"
    assert shortened((0, 1)) == "(0, 1)" and shortened(tuple(range(99))).endswith("...: 99 ranks")


@pytest.mark.mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_progress_threads_pause_while_mpi_creates_the_communicator(comm, monkeypatch):
    create, poll, turns, paused = meeting._create, FailureNotices.poll, [], []

    def polled(notices):
        turns.append(1)
        poll(notices)

    def slowly(*arguments):
        before = len(turns)
        time.sleep(0.05)
        paused.append(before == len(turns))
        return create(*arguments)

    monkeypatch.setattr(FailureNotices, "poll", polled)
    monkeypatch.setattr(meeting, "_create", slowly)
    with Machine(comm, segment_size="1MiB", progress="thread"):
        meeting.meet(comm, tuple(range(comm.size))[::-1], 30).Free()
        before = len(turns)
        time.sleep(0.5)
        assert len(turns) > before and paused[-1]

"""Lines that all processes of a job can read."""

import pytest

from distdl_rma.segments.lifecycle.job_board import JobBoard

pytestmark = pytest.mark.mpi


@pytest.fixture
def board(comm):
    made = JobBoard()
    if not made.usable():
        pytest.skip("the launcher keeps nothing")
    yield made
    comm.Barrier()
    made.write("")
    comm.Barrier()


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


def test_a_line_is_cut_where_the_launcher_takes_no_more(board, comm):
    board.write("x" * 10_000)
    assert board.read(comm.rank) == "x" * board.longest

"""Pieces of large vectors: what order they take, and that collectives give the same in pieces."""

import weakref

import numpy as np
import pytest

from distdl_rma import ProtocolError
from distdl_rma.segments import Allreduce
from distdl_rma.segments.collectives.between_nodes import in_pieces, number_of_pieces, pieces_of_all, slices
from distdl_rma.segments.collectives.node_layout import RankSlice

LONG = 30_000


def test_pieces_are_few_and_of_small_vectors_there_is_one():
    assert {number_of_pieces(1 << 40, 1), number_of_pieces(0, 2), number_of_pieces(1 << 20, 2)} == {1}
    assert number_of_pieces(16 << 20, 2) == 2
    found = [number_of_pieces(1 << 28, nodes) for nodes in (2, 64, 1024, 4096, 1 << 20)]
    assert found[0] == 4 and found == sorted(found, reverse=True) and found[-1] == 1


def test_slices_are_all_of_it_in_order():
    for count in (0, 1, 3, 8, 101):
        assert [i for at in slices(count, 5) for i in range(count)[at]] == list(range(count))
    parts = [[RankSlice(0, 0, 5), RankSlice(1, 9, 10)], [], [RankSlice(2, 5, 6)]]
    cut = pieces_of_all(parts, 4)
    assert [sum(part.size for part in of_node) for of_node in cut[0]] == [2, 0, 1]
    for node, of_node in enumerate(parts):
        wanted = [i for part in of_node for i in range(part.start, part.stop)]
        assert [i for piece in cut for part in piece[node] for i in range(part.start, part.stop)] == wanted


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_a_stage_begins_on_a_piece_before_the_next_goes_on_with_the_last(number):
    said, under_way = [], set()

    def plan(piece):
        for at in range(3):
            # What a stage began is waited for before the next.
            assert (at - 1, piece) not in under_way
            said.append((at, piece))
            under_way.add((at, piece))
            assert sum(which == at for which, _ in under_way) <= 2
            yield rest(at, piece)

    def rest(at, piece):
        yield from [None] * piece
        under_way.remove((at, piece))

    waits = list(in_pieces(map(plan, range(number))))
    assert not under_way and len(waits) == 3 * sum(range(number))
    assert len(said) == 3 * number and all(said.index((0, k)) < said.index((1, k)) for k in range(number))
    assert all(said.index((0, k + 1)) < said.index((1, k)) for k in range(number - 1))
    assert all(said.index((1, k + 1)) < said.index((2, k)) for k in range(number - 1))


class Unfinished:
    """A request of MPI that is complete when it is looked at a second time, and holds nothing."""

    def __init__(self):
        self.looks = 0

    def Test(self):  # noqa: N802
        self.looks += 1
        return self.looks == 2


@pytest.mark.mpi(min_size=2)
def test_buffers_are_held_until_mpi_has_done_with_them(segments, comm):
    job = Allreduce(segments, segments.ranks, LONG, np.float32, name="held")
    job.connect()
    buffer = np.ones(3)
    held = weakref.ref(buffer)
    waiting = job._algorithm.between.begun(Unfinished(), 24, buffer)
    del buffer
    next(waiting)
    assert held() is not None
    assert not [*waiting]
    del waiting
    assert held() is None
    comm.Barrier()
    job.close()


@pytest.mark.mpi
def test_what_is_interrupted_between_pieces_is_broken(segments, comm, tiny):
    job = Allreduce(segments, segments.ranks, LONG, np.float32, name="interrupted")
    job.connect()
    algorithm, nodes = job._algorithm, len(segments.segment.direct_nodes)
    comm.Barrier()
    # All ranks are interrupted, if each has a share.
    if nodes > 1 and nodes * algorithm.layout.shares == comm.size:
        begun = algorithm._combine

        def interrupted(cut, piece):
            if piece == 2:
                raise KeyboardInterrupt("by hand")
            return begun(cut, piece)

        algorithm._combine = interrupted
        job.active[:] = 1
        # Else a thread that takes steps might be interrupted.
        with segments.segment.lock, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            job.start()
            job.wait()
        with pytest.raises(ProtocolError, match="step 1 was interrupted by KeyboardInterrupt"):
            job.wait()
        # MPI may still write to what was begun: it is kept.
        kept = algorithm.between._under_way.values()
        assert kept and all(buffers for _, buffers in kept)
    comm.Barrier()
    job.close()
    again = Allreduce(segments, segments.ranks, LONG, np.float32, name="interrupted")
    again.active[:] = 1
    again.start()
    assert (again.wait() == comm.size).all()
    again.close()

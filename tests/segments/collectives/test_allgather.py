"""Double-buffered collectives that give every vector, or one, to all ranks."""

import numpy as np
import pytest

from distdl_rma.segments import Allgather, Bcast

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [np.int16, np.dtype("2u1,f8")])
def test_result_is_the_operands_one_behind_the_other_in_the_order_of_the_ranks(segments, comm, dtype):
    ranks = segments.ranks[::-1]
    lengths = [(3 * rank) % 5 for rank in ranks]
    job = Allgather(segments, ranks, lengths, dtype, "lengths")
    numbers = {rank: np.arange(7 * rank, 7 * rank + n) for rank, n in zip(ranks, lengths, strict=True)}
    operands = [numbers[rank].astype(np.int16).astype(dtype) for rank in ranks]
    for _ in range(4):
        job.active[...] = operands[ranks.index(comm.rank)]
        job.start()
        assert np.array_equal(job.wait(), np.concatenate(operands))
    job.close()


def test_nothing_to_gather_is_legal(segments):
    job = Allgather(segments, segments.ranks, 0, np.float64, "nothing")
    job.start()
    assert job.wait().size == 0
    job.close()


@pytest.mark.parametrize("count", [0, 1, 4000])
def test_everyone_has_the_vector_of_the_root_whoever_that_is(segments, comm, count):
    for root in segments.ranks:
        job = Bcast(segments, segments.ranks[::-1], count, np.float32, root, f"from {root}")
        for step in range(3):
            job.active[:] = 10 * comm.rank + step
            job.start()
            result = job.wait()
            assert result.size == count and (result == 10 * root + step).all()
        job.close()


def test_without_a_root_it_is_the_first_of_the_ranks(segments):
    job = Bcast(segments, segments.ranks[::-1], 1, name="first")
    assert job.root == segments.ranks[-1]
    job.close()

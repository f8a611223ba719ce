"""All-gathers of vectors of different lengths."""

import numpy as np
import pytest

from distdl_rma.segments import Allgather

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

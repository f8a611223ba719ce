"""Collectives that were built wrongly, or differently on different ranks."""

import numpy as np
import pytest

from distdl_rma import MismatchError
from distdl_rma.segments import Allreduce, Bcast

pytestmark = pytest.mark.mpi


def test_ranks_that_mean_different_collectives_learn_it(segments, comm):
    if comm.size == 1:
        pytest.skip("nobody can differ")
    if 1 < len(segments.segment.direct_nodes) < comm.size:
        pytest.skip("who meets nobody that differs would wait for those who gave up")
    job = Allreduce(segments, segments.ranks, 30_000 + comm.rank, np.float32, name="differs")
    with pytest.raises(MismatchError, match=r"'differs.*count is 3000\d on rank \d and 3000\d on rank \d"):
        job.connect()
    comm.Barrier()
    job.close()


@pytest.mark.mpi(min_size=2)
def test_mismatch_says_which_arguments_differ_with_both_values(segments, comm):
    if len(segments.segment.direct_nodes) > 1:
        pytest.skip("who meets nobody that differs would wait for those who gave up")
    odd = comm.rank % 2
    jobs = {
        r"dtype is float\d\d on rank \d and float\d\d on rank \d\)": Allreduce(
            segments, segments.ranks, 4, (np.float32, np.float64)[odd], name="types"
        ),
        r"op is (sum|max) on rank \d and (sum|max) on rank \d\)": Allreduce(
            segments, segments.ranks, 4, np.float32, ("sum", "max")[odd], name="operations"
        ),
        r"root is [01] on rank \d and [01] on rank \d\)": Bcast(
            segments, segments.ranks, 4, np.float32, odd, name="roots"
        ),
    }
    for said, job in jobs.items():
        with pytest.raises(MismatchError, match=said):
            job.connect()
        comm.Barrier()
        job.close()

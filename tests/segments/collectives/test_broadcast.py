"""Broadcasts from any rank."""

import numpy as np
import pytest

from distdl_rma.segments import Bcast

pytestmark = pytest.mark.mpi


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

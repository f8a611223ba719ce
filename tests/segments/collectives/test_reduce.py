"""Reductions to one rank."""

import numpy as np
import pytest

from distdl_rma.segments import Reduce

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("count", [1, 4000])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_the_root_alone_has_the_result(segments, comm, count, op):
    rows = [np.arange(count) * (rank + 1) for rank in segments.ranks]
    for root in segments.ranks:
        job = Reduce(segments, segments.ranks, count, np.int64, op, root, f"{op} to {root}")
        job.active[:] = rows[comm.rank]
        job.start()
        expected = getattr(np.array(rows), op)(0)
        assert np.array_equal(job.wait(), expected if comm.rank == root else [])
        job.close()

"""Reductions of which every rank gets a part, or one of them all."""

import random

import numpy as np
import pytest

from distdl_rma.segments import Allgather, Allreduce, Reduce, Reducescatter

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_all_ranks_together_are_an_allreduce(segments, comm, seed):
    draw = random.Random(seed)
    lengths = [draw.choice((0, 1, 300, 2000)) for _ in segments.ranks]
    count = sum(lengths)
    whole = Allreduce(segments, segments.ranks, count, np.int32, "sum", "whole")
    parts = Reducescatter(segments, segments.ranks, lengths, np.int32, "sum", "parts")
    gather = Allgather(segments, segments.ranks, lengths, np.int32, "gathered")
    whole.active[:] = parts.active[:] = np.arange(count) * (comm.rank + 1)
    whole.start()
    parts.start()
    gather.active[:] = parts.wait()
    gather.start()
    assert np.array_equal(gather.wait(), whole.wait())
    for job in (whole, parts, gather):
        job.close()


def test_one_count_is_cut_into_balanced_parts(segments, comm):
    job = Reducescatter(segments, segments.ranks, 10, np.float64, name="balanced")
    assert sum(job.counts) == 10 and max(job.counts) - min(job.counts) <= 1
    job.active[:] = 1
    job.start()
    assert job.wait().tolist() == [comm.size] * job.counts[comm.rank]
    job.close()


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

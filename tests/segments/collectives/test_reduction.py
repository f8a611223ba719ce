"""What reductions mean for each type of elements, over every kind of nodes."""

import numpy as np
import pytest

from distdl_rma.segments import Allreduce
from distdl_rma.segments.collectives.reduction import element_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_integers_wrap_around_as_in_numpy(segments, comm, count, kind, op):
    def values(rank):
        bits = np.random.default_rng(rank).integers(0, 256, count * np.dtype(kind).itemsize, np.uint8)
        return bits.view(kind)

    job = Allreduce(segments, segments.ranks, count, kind, op, f"{op} of {kind} {count}")
    job.active[:] = values(comm.rank)
    job.start()
    expected = getattr(np.array([values(rank) for rank in segments.ranks]), op)(0, dtype=kind)
    assert job.wait().dtype == kind and np.array_equal(job.result, expected)
    job.close()


@pytest.mark.parametrize("kind", ["i1", "i2", "u1", "u2"])
def test_no_mpi_is_given_short_integers_to_sum(kind):
    # Open MPI has them stop at the largest where the processor can.
    assert element_of(kind, "short").wide.itemsize >= 4


@pytest.mark.parametrize("count", [4, 20_000])
def test_of_truth_values_max_is_any_and_min_and_prod_are_all(segments, comm, count):
    # Each element is true on one rank only, or on all of them, or on none.
    where = np.arange(count) % (comm.size + 2)
    rows = np.array([(where == rank) | (where == comm.size) for rank in range(comm.size)])
    for op, expected in (("max", rows.any(0)), ("min", rows.all(0)), ("prod", rows.all(0))):
        job = Allreduce(segments, segments.ranks, count, bool, op, f"{op} of bool {count}")
        job.active[:] = rows[comm.rank]
        job.start()
        assert np.array_equal(job.wait(), expected), op
        job.close()


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_summed_and_multiplied(segments, comm, count, dtype):
    def values(rank):
        parts = np.random.default_rng(rank).integers(-9, 9, 2 * count)
        return (parts[::2] + 1j * parts[1::2]).astype(dtype)

    rows = np.array([values(rank) for rank in segments.ranks])
    # Of small integers: exact.
    for op, expected in (("sum", rows.sum(0)), ("prod", rows.prod(0)), ("mean", rows.sum(0) / comm.size)):
        job = Allreduce(segments, segments.ranks, count, dtype, op, f"{op} of complex {count}")
        job.active[:] = values(comm.rank)
        job.start()
        np.testing.assert_allclose(job.wait(), expected, rtol=1e-6)
        assert op == "mean" or np.array_equal(job.result, expected)
        job.close()

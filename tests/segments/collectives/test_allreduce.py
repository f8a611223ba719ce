"""Double-buffered reductions: the result for all ranks, a part for each, or all of it for one."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ArgumentError, ClosedError, PartitionError, ProtocolError, ShapeError
from distdl_rma.segments import Allgather, Allreduce, Reduce, Reducescatter
from tests.matrix import over_seeds

pytestmark = pytest.mark.mpi

REDUCE = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.sum(0) / len(rows),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
}


def operand(job, rank, step, count, dtype):
    return np.random.default_rng((job, rank, step)).integers(-9, 9, count).astype(dtype)


@over_seeds(4)
def test_reductions_over_random_ranks_in_any_order_of_waiting(machine, comm, seed):
    rng, mine = random.Random(seed), random.Random(100 * seed + comm.rank)
    jobs = []
    for number in range(16):
        ranks = rng.sample(range(comm.size), rng.randint(1, comm.size))
        count = rng.choice([0, 1, 2, 3, 5, 7, 100, 2000, 3001, 40_000])
        dtype = np.dtype(rng.choice(["f4", "f8", "f2", "i4", "i8"]))
        op = rng.choice([op for op in REDUCE if op != "mean" or dtype.kind == "f"])
        if comm.rank in ranks:
            job = Allreduce(machine.segments, ranks, count, dtype, op, f"job{seed}.{number}")
            jobs.append((number, ranks, count, dtype, op, job))
    for step in range(10):
        for number, _, count, dtype, _, job in jobs:
            job.active[:] = operand(number, comm.rank, step, count, dtype)
            job.start()
            if mine.random() < 0.05:
                time.sleep(2e-3)
        mine.shuffle(jobs)
        for number, ranks, count, dtype, op, job in jobs:
            rows = np.array([operand(number, rank, step, count, dtype) for rank in ranks])
            tolerance = 1e-3 if dtype == np.float16 else 1e-6
            np.testing.assert_allclose(job.wait(), REDUCE[op](rows), rtol=tolerance, atol=tolerance)
        jobs.sort(key=lambda entry: entry[0])
    comm.Barrier()
    for *_, job in jobs:
        job.close()


@pytest.mark.parametrize("count", [1, 5, 700, 50_000])
def test_result_is_bitwise_equal_on_all_ranks_and_from_run_to_run(machine, comm, count):
    job = Allreduce(machine.segments, machine.ranks, count, np.float32, "sum", f"bits{count}")
    results = []
    for _ in range(2):
        job.active[:] = np.random.default_rng(comm.rank).standard_normal(count) * 10.0**comm.rank
        job.start()
        results.append(job.wait().tobytes())
    assert len(set(comm.allgather(results[0]))) == 1 and results[0] == results[1]
    job.close()


def test_float16_is_summed_in_float32(machine, comm):
    job = Allreduce(machine.segments, machine.ranks, 3, np.float16, "mean", "half")
    job.active[:] = 40_000.0  # the sum of two is beyond float16
    job.start()
    assert (job.wait() == np.float16(40_000.0)).all()
    job.close()


@pytest.mark.parametrize("count", [3, 50_000])
def test_next_operand_is_written_while_a_step_travels_and_the_result_stays(machine, comm, count):
    job = Allreduce(machine.segments, machine.ranks, count, np.int64, "sum", f"double{count}")
    total = sum(machine.ranks)
    previous = None
    for step in range(1, 30):
        job.active[:] = step + comm.rank
        written = job.active.ctypes.data
        job.start()
        assert job.active.ctypes.data != written
        if previous is not None:
            # The last result lies in the buffer that is active now, and is still what it was.
            assert (job.active == previous).all()
        result = job.wait()
        assert result.ctypes.data == written, "the result takes the place of the operand"
        previous = comm.size * step + total
        assert (result == previous).all()
    job.close()


def test_test_advances_without_blocking(machine):
    job = Allreduce(machine.segments, machine.ranks, 10, np.float64, "max", "polled")
    job.active[:] = machine.rank
    job.start()
    deadline = time.monotonic() + 60
    while not job.test():
        assert time.monotonic() < deadline
    assert (job.result == max(machine.ranks)).all()
    job.close()


def test_calls_out_of_order_raise(machine):
    job = Allreduce(machine.segments, machine.ranks, 4, np.float32, name="strict")
    with pytest.raises(ProtocolError, match="'strict': wait without a start"):
        job.wait()
    with pytest.raises(ProtocolError, match="before a step was waited for"):
        _ = job.result
    job.active[:] = 1
    job.start()
    with pytest.raises(ProtocolError, match="started while a step is running"):
        job.start()
    job.wait()
    job.close()
    with pytest.raises(ClosedError, match="'strict': already closed"):
        job.start()


def test_wrong_arguments_are_named(machine):
    with pytest.raises(ArgumentError, match="operation is one of"):
        Allreduce(machine.segments, machine.ranks, 1, op="product")
    with pytest.raises(ShapeError, match="a reduction takes"):
        Allreduce(machine.segments, machine.ranks, 1, np.longdouble)
    for dtype in (np.int64, np.uint8):
        with pytest.raises(ShapeError, match="a mean of integers is not exact"):
            Allreduce(machine.segments, machine.ranks, 1, dtype, "mean")
    for op in ("min", "max"):
        with pytest.raises(ShapeError, match="complex numbers have no order"):
            Allreduce(machine.segments, machine.ranks, 1, np.complex64, op)
    for op in ("sum", "mean"):
        with pytest.raises(ShapeError, match=f"a {op} of bool counts nothing"):
            Allreduce(machine.segments, machine.ranks, 1, bool, op)
    with pytest.raises(PartitionError, match="hold this rank"):
        Allreduce(machine.segments, (machine.rank + 1,), 1)


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

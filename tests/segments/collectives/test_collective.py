"""All double-buffered collectives, over every kind of nodes: values, orders, timeouts, recovery."""

import gc
import os
import random
import threading
import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, ProtocolError, ShapeError
from distdl_rma.segments import Allgather, Allreduce, Bcast
from tests.matrix import over_seeds
from tests.segments.cases import Case

pytestmark = pytest.mark.mpi


@pytest.mark.usefixtures("cut")
@over_seeds(6)
def test_collectives_over_random_ranks_in_any_order_of_waiting(segments, comm, seed):
    rng, mine = random.Random(seed), random.Random(100 * seed + comm.rank)
    cases = [case for number in range(14) if (case := Case(segments, rng, 100 * seed + number)).active]
    for step in range(6):
        for case in cases:
            case.job.active[:] = case.operand(case.me, step)
            case.job.start()
            if mine.random() < 0.05:
                time.sleep(2e-3)
        for case in mine.sample(cases, len(cases)):
            if mine.random() < 0.3:
                while not case.job.test():
                    os.sched_yield()
                case.check(case.job.result, step)
            else:
                case.check(case.job.wait(), step)
    for case in cases:
        case.job.close()


@pytest.mark.usefixtures("cut")
@pytest.mark.in_turn(1, 3, 4)
@pytest.mark.parametrize("count", [1, 6, 700, 50_001])
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "f4"), ("mean", "c8"), ("prod", "f4"), ("sum", "c16"), ("sum", "bfloat16")]
)
def test_reductions_are_bitwise_equal_on_all_ranks_and_from_run_to_run(
    segments, closing, comm, count, op, dtype
):
    values = np.random.default_rng(comm.rank).standard_normal(2 * count) * 10.0**comm.rank
    if dtype == "bfloat16":
        # The words, of which the first half says most.
        values = values.astype(np.float32).view(np.uint16)[1::2]
    elif "c" in dtype:
        values = values.view(complex)
    names, results = [f"bits {count} {n}" for n in range(2)], []
    jobs = [closing(Allreduce(segments, segments.ranks, count, dtype, op, name)) for name in names]
    for job in (*jobs, *jobs):
        time.sleep(random.Random(count + comm.rank + len(results)).random() * 3e-3)
        job.active[:] = values[:count]
        job.start()
        results.append(job.wait().tobytes())
    assert len(set(comm.allgather(results[0]))) == 1 and len(set(results)) == 1


def test_sums_of_float16_may_be_beyond_float16_and_structures_travel_as_they_are(segments, closing, comm):
    job = closing(Allreduce(segments, segments.ranks, 3, np.float16, "mean", "half"))
    assert (job(np.full(3, 40_000.0)) == np.float16(40_000.0)).all()
    ranks, kind = segments.ranks[::-1], np.dtype("2u1,f8")
    job = closing(Allgather(segments, ranks, [(3 * rank) % 5 for rank in ranks], kind, "structures"))
    values = [np.arange(7 * rank, 7 * rank + 3 * rank % 5).astype(np.int16).astype(kind) for rank in ranks]
    assert np.array_equal(job(values[ranks.index(comm.rank)]), np.concatenate(values))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(np.int32, [1.0, 2.0]), (np.int64, np.zeros(2)), (bool, np.ones(2)), (np.float32, [1j, 0])],
)
def test_values_that_would_lose_their_fractions_or_imaginary_parts_are_refused(
    segments, closing, dtype, values
):
    job = closing(Allgather(segments, segments.ranks, 2, dtype, name="lossy"))
    with pytest.raises(ShapeError, match=r"'lossy': values of (float|complex).* do not fit into"):
        job(values)
    with pytest.raises(ShapeError, match="'lossy': a masked array"):
        job(np.ma.array([0, 1], dtype, mask=[0, 1]))
    assert (job([0, 1]).reshape(-1, 2) == [0, 1]).all()
    # Of both numpy alone makes floats.
    job = closing(Allgather(segments, segments.ranks, 2, np.uint64, name="long"))
    assert job([2**64 - 1, 1]).tolist() == [2**64 - 1, 1] * len(segments.ranks)


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32_and_rounded_once(segments, closing, comm, count, dtype):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)

    def values(rank):
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(count, generator=generator) * 100).to(kind)

    job = closing(Allreduce(segments, segments.ranks, count, dtype, "sum", f"{dtype} {count}"))
    view = torch.uint16 if dtype == "bfloat16" else torch.float16
    # The order of a sum across nodes is MPI's; of these values it makes no difference before rounding.
    exact = [values(rank).double() for rank in segments.ranks]
    job.active[:] = values(comm.rank).view(view).numpy()
    job.start()
    found = torch.from_numpy(job.wait().copy()).view(kind)
    expected = sum(exact).float().to(kind)
    assert (found == expected).double().mean() > 0.99
    assert torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1)


@pytest.mark.usefixtures("cut")
def test_steps_run_ahead_without_overwriting_what_others_still_read(segments, closing, comm):
    ranks, size = segments.ranks, comm.size
    made = [
        # The first of its ranks is the root.
        Bcast(segments, ranks[::-1], 3000, np.int64, name="ahead"),
        Allgather(segments, ranks[::-1], 300, np.int64, name="ahead too"),
        Allreduce(segments, ranks, 30, np.int64, name="ahead as well"),
        Allreduce(segments, ranks, 3000, np.int64, name="ahead, in shares"),
    ]
    jobs = [closing(job) for job in made]
    mine, everyone, before = random.Random(comm.rank), np.array(ranks), {}
    for step in range(80):
        operands = {}
        for job in jobs:
            job.active[:] = 1000 * step + comm.rank
            operands[job] = job.active.ctypes.data
            job.start()
            # The last result lies in the buffer that is active now, and is still what it was.
            if job in before:
                assert job.active.ctypes.data != operands[job] and (job.active == before[job]).all()
        if mine.random() < 0.1:
            time.sleep(1e-3)
        assert (jobs[0].wait() == 1000 * step + ranks[-1]).all()
        assert (jobs[1].wait().reshape(size, -1) == 1000 * step + everyone[::-1, None]).all()
        for job in jobs[2:]:
            total = job.wait()
            assert (total == (1000 * step + everyone).sum()).all()
            assert total.ctypes.data == operands[job], "the result takes the place of the operand"
            before[job] = total.copy()


def wait_for(job, late, where):
    """Wait in vain until this rank is named, or any: others that are slow are missed as well."""
    wanted, missing, deadline = f"for rank{'' if late is None else f' {late} '}", "", time.monotonic() + 60
    while wanted not in missing:
        assert time.monotonic() < deadline, missing
        with pytest.raises(ExchangeTimeout, match=rf"in 'late' \({where}") as caught:
            job.wait(timeout=0.1)
        missing = str(caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [4, 30_000])
def test_a_wait_names_the_missing_rank_and_can_be_repeated(segments, closing, comm, count):
    job, late = closing(Allreduce(segments, segments.ranks, count, np.int64, name="late")), comm.size - 1
    job.connect()
    if comm.rank == late:
        comm.Barrier()
        comm.Barrier()
        time.sleep(0.1)
    job.active[:] = 1
    job.start()
    if comm.rank != late:
        # However slow the others are, they have started.
        comm.Barrier()
        # Between nodes MPI waits for all ranks of a share; which of them is late, the chain of waits says.
        exact = count < 10 or len(segments.segment.direct_nodes) == 1
        where = "step 1, on this node" if exact and count > 10 else ""
        wait_for(job, late if exact else None, where)
        with pytest.raises(ExchangeTimeout):
            job.wait(timeout=0)
        comm.Barrier()
    assert (job.wait() == comm.size).all()
    comm.Barrier()


def test_closing_a_running_step_does_not_leave_the_others_waiting(segments, comm):
    job = Allreduce(segments, segments.ranks, 30_000, np.float32, name="closed early")
    job.active[:] = 1
    job.start()
    if comm.rank == 0:
        job.close()
        request = comm.Ibarrier()
        while not request.Test():
            segments.progress()
    else:
        assert (job.wait() == comm.size).all()
        comm.Ibarrier().Wait()
        job.close()
    used = segments.heap.used
    segments.get_segment_buffer(8).free()
    assert segments.heap.used <= used


def raises(*_):
    raise KeyboardInterrupt("by hand")


def raises_later(_):
    yield
    while threading.current_thread().name == "distdl_rma progress":
        # No progress thread is interrupted by hand.
        yield
    raises()


@pytest.mark.parametrize(
    ("count", "where", "at_start"),
    [
        (4, {"_reduce": (raises, raises)}, False),
        (4, {"push": raises}, True),
        (30_000, {"script": raises_later}, False),
        (30_000, {"script": lambda _: iter(raises, 0)}, True),
    ],
    ids=["reduce", "push", "in the script", "at its begin"],
)
def test_an_interrupted_step_is_never_taken_for_a_complete_one(
    segments, closing, comm, count, where, at_start
):
    if comm.size == 1 and count > 4:
        pytest.skip("one rank has no shares")
    job = Allreduce(segments, segments.ranks, count, np.float32, name="interrupted")
    job.connect()
    comm.Barrier()
    for name, value in where.items():
        setattr(job._algorithm, name, value)
    job.active[:] = 1
    if not at_start:
        job.start()
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        job.start() if at_start else job.wait()
    for call in (job.start, job.test, job.wait, job.wait, lambda: job.result):
        with pytest.raises(ProtocolError, match="'interrupted': step 1 was interrupted by KeyboardInterrupt"):
            call()
    segments.progress()
    job.close()
    comm.Barrier()
    again = closing(Allreduce(segments, segments.ranks, count, np.float32, name="interrupted"))
    assert (again(np.ones(count)) == comm.size).all()


@pytest.mark.parametrize("count", [4, 30_000])
@pytest.mark.filterwarnings("error")
def test_floating_point_errors_are_results(segments, closing, comm, count):
    job = closing(Allreduce(segments, segments.ranks, count, np.float32, "mean", name="infinite"))
    with np.errstate(all="raise"):
        job.active[:] = 1
        job.active[:2] = 3e38, -np.inf if comm.rank else np.inf
        job.start()
        result = job.wait()
    assert (result[2:] == 1).all()
    if comm.size > 1:
        assert np.isinf(result[0]) and np.isnan(result[1])


@pytest.mark.parametrize("count", [3, 20_000])
def test_a_call_is_a_step_and_a_forgotten_collective_gives_its_memory_back(segments, comm, count):
    job = Allreduce(segments, segments.ranks, count, np.float64, name=f"forgotten {count}")
    for step in range(3):
        total = job(np.full(count, comm.rank + step))
        assert (total == sum(range(comm.size)) + comm.size * step).all()
    name = job.name
    del job
    gc.collect()
    comm.Barrier()
    assert name not in segments.stats().owners

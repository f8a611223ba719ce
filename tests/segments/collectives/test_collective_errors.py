"""What collectives refuse: arguments, alone or since those of other ranks differ, and calls out of order."""

from __future__ import annotations

import os

import numpy as np
import pytest

from distdl_rma import ArgumentError, ClosedError, MismatchError, PartitionError, ProtocolError, ShapeError
from distdl_rma.segments import Allgather, Allreduce, Bcast, Group
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.collective import CollectiveSite
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.collectives.reduction import element_of

pytestmark = pytest.mark.mpi

BUILT = [
    (ArgumentError, "operation is one of", lambda s: Allreduce(s, s.ranks, 1, op="product")),
    (ShapeError, "a reduction takes", lambda s: Allreduce(s, s.ranks, 1, np.longdouble)),
    (ShapeError, "a mean of integers is not exact", lambda s: Allreduce(s, s.ranks, 1, np.int64, "mean"),
     lambda s: Allreduce(s, s.ranks, 1, np.uint8, "mean")),
    (ShapeError, "complex numbers have no order", lambda s: Allreduce(s, s.ranks, 1, np.complex64, "min"),
     lambda s: Allreduce(s, s.ranks, 1, np.complex64, "max")),
    (ShapeError, "bxor is of integers and bool", lambda s: Allreduce(s, s.ranks, 1, np.float32, "bxor"),
     lambda s: Allreduce(s, s.ranks, 1, "bfloat16", "bxor")),
    (ShapeError, "a sum of bool counts nothing", lambda s: Allreduce(s, s.ranks, 1, bool, "sum")),
    (ShapeError, "a mean of bool counts nothing", lambda s: Allreduce(s, s.ranks, 1, bool, "mean")),
    (ShapeError, "numbers of elements", lambda s: Allgather(s, s.ranks, [1] * (len(s.ranks) + 1))),
    (ShapeError, "no segment holds an array of", *(lambda s, m=m, d=d: m(s, s.ranks, 3, d)
        for m in (Allgather, Bcast) for d in ("float5", "O", "S", np.dtype(("f4", (2,)))))),
    (ShapeError, r"integer, at least 0, got (-1|1\.5)", *(lambda s, n=n: Allreduce(s, s.ranks, n)
        for n in (-1, 1.5))),
    (PartitionError, "root is one of the ranks", lambda s: Bcast(s, s.ranks, 1, root=99)),
    (PartitionError, "of the machine", lambda s: Allreduce(s, (s.rank, 99), 1),
     lambda s: Group(s, (s.rank, 17))),
    (PartitionError, "hold this rank", lambda s: Allreduce(s, (s.rank + 1,), 1),
     lambda s: Group(s, [rank for rank in s.ranks if rank != s.rank])),
    (PartitionError, r"'group': ranks must be unique, .* got \(0, 0\)", lambda s: Group(s, (0, 0))),
    (PartitionError, "'here': ranks must be unique", lambda s: CollectiveSite.checked(s, (), "here")),
]  # fmt: skip


def test_wrong_arguments_are_named_and_ranks_in_any_order_are_laid_out_by_node(segments):
    before = segments.stats().owners
    for error, words, *calls in BUILT:
        for call in calls:
            with pytest.raises(error, match=words):
                call(segments)
    assert segments.stats().owners == before
    manager, layout, name = CollectiveSite.checked(segments, segments.ranks[::-1], "here")
    assert (manager, name) == (segments, "here")
    assert layout.ranks == segments.ranks[::-1] and layout.me == segments.rank
    assert {frozenset(node) for node in layout.nodes} == {*map(frozenset, segments.segment.direct_nodes)}
    # Open MPI has short integers stop at the largest, where the processor can.
    assert all(element_of(kind, "short").wide.itemsize >= 4 for kind in ("i1", "i2", "u1", "u2"))


@pytest.mark.parametrize("count", [4, 30_000])
@pytest.mark.parametrize("make", [Allreduce, Bcast])
def test_calls_out_of_order_raise_and_a_step_can_be_tested_until_it_is_waited_for_once(segments, make, count):
    job = make(segments, segments.ranks, count, np.float32, name="strict")
    for _ in range(3):
        for call, what in ((job.wait, "wait"), (job.test, "test")):
            with pytest.raises(ProtocolError, match=f"'strict': {what} without a start"):
                call()
        job.active[:] = 0
        job.start()
        with pytest.raises(ProtocolError, match="before a step was waited for"):
            _ = job.result
        with pytest.raises(ProtocolError, match="started while a step is running"):
            job.start()
        while not job.test():
            os.sched_yield()
        assert job.test() and not job.running
        assert not job.wait().any() and not job.result.any()
    job.close()
    with pytest.raises(ClosedError, match=f"{make.__name__} 'strict': already closed"):
        job.start()


@pytest.mark.parametrize(
    "make",
    [
        lambda segments, terms: AllPush(segments, segments.ranks, 1, np.int64, "terms", terms),
        lambda segments, terms: EqualityCheck(segments, segments.ranks, "terms", terms),
    ],
    ids=["all push", "equality check"],
)
def test_ranks_that_mean_something_else_by_a_name_learn_what_and_what_is_closed_says_so(segments, comm, make):
    handle = make(segments, f"width={comm.rank}")
    if comm.size > 1:
        with pytest.raises(MismatchError, match=r"width is \d on rank \d and \d on rank \d"):
            handle.connect()
    comm.Barrier()
    handle.close()
    handle.close()
    with pytest.raises(ClosedError, match="'terms': already closed"):
        handle.wait()


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_says_which_arguments_differ_with_both_values(segments, closing, comm):
    nodes, odd = len(segments.segment.direct_nodes), comm.rank % 2
    if 1 < nodes < comm.size:
        pytest.skip("who meets nobody that differs would wait for those who gave up")
    jobs = [
        ("count", r"3000\d", Allreduce, (30_000 + comm.rank,)),
        ("dtype", r"float\d\d", Allreduce, (4, (np.float32, np.float64)[odd])),
        ("op", "(sum|max)", Allreduce, (4, np.float32, ("sum", "max")[odd])),
        ("root", "[01]", Bcast, (4, np.float32, odd)),
    ]
    for what, value, make, given in jobs[: 1 if nodes > 1 else None]:
        job = closing(make(segments, segments.ranks, *given, name="differs"))
        words = rf"'differs.*{what} is {value} on rank \d and {value} on rank \d"
        with pytest.raises(MismatchError, match=words if what == "count" else rf"{words}\)"):
            job.connect()
        comm.Barrier()

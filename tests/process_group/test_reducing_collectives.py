"""Reductions as torch calls them: what is checked before anything is begun, by all ranks alike."""

import pytest
import torch
from torch.distributed import ReduceOp, ReduceScatterOptions

from distdl_rma.errors import ShapeError, UnsupportedError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def test_what_does_not_fit_is_refused_by_all_and_the_group_goes_on(group):
    size, x = group.size(), torch.ones(6)
    average = ReduceScatterOptions()
    average.reduceOp = ReduceOp.AVG
    for call, kind, words in (
        (lambda: group.allreduce([x, x]), ShapeError, "one tensor per rank, got 2"),
        (lambda: group.allreduce([x], ReduceOp.BAND), ShapeError, "band is of integers"),
        (lambda: group.allreduce([x.int()], ReduceOp.AVG), ShapeError, "an average of torch.int32"),
        (lambda: group.allreduce([x.to(torch.float8_e5m2)]), UnsupportedError, "cannot be reduced"),
        (lambda: group.reduce_scatter([x], [[x] * (size + 1)]), ShapeError, f"each of {size} ranks, got"),
        (
            lambda: group.reduce_scatter([x[1:]], [[x] * size]),
            ShapeError,
            "part has 6 elements, its output 5",
        ),
        (lambda: group.reduce_scatter([x], [[x.int()] * size]), ShapeError, "of one type"),
        (lambda: group.reduce_scatter_single(x, x[1:]), ShapeError, f"{size} parts of 6 elements are not"),
        (lambda: group.reduce_scatter([x.int()], [[x.int()] * size], average), ShapeError, "an average of"),
    ):
        with pytest.raises(kind, match=words):
            call().wait()
    group.allreduce([x]).wait()
    assert (x == size).all()


def test_several_tensors_at_a_time(group):
    me, size = group.rank(), group.size()
    some = [torch.full((k,), float(me), dtype=dtype) for k, dtype in ((3, torch.float32), (2, torch.int64))]
    group.allreduce_coalesced(some).wait()
    total = sum(range(size))
    assert [x.tolist() for x in some] == [[total] * 3, [total] * 2]
    outs, wholes = [torch.empty(k) for k in (1, 4)], [torch.arange(float(k * size)) for k in (1, 4)]
    group.reduce_scatter_single_coalesced(outs, wholes).wait()
    for out, whole in zip(outs, wholes, strict=True):
        assert torch.equal(out, whole.chunk(size)[me] * size)

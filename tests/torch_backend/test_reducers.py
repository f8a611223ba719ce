"""Reductions of rows: the meaning of each operation, its order, and its rounding."""

import warnings

import pytest
import torch
from torch.distributed import ReduceOp

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.torch_backend.tensors import Flat, reducer_of


def reduced(op, rows, into=0):
    tensors = [row.clone() for row in rows]
    reducer_of(op, rows[0].dtype, len(rows)).reduce(
        [Flat(t).elements for t in tensors], Flat(tensors[into]).elements
    )
    return tensors[into]


@pytest.mark.parametrize("into", [0, 1, 2])
def test_rows_are_added_in_their_order_into_any_of_them(into):
    rows = [torch.tensor([1e8, 1.0, 3.0]), torch.tensor([-1e8, 2.0, 4.0]), torch.tensor([1.0, 1e-8, 5.0])]
    assert torch.equal(reduced(ReduceOp.SUM, rows, into), rows[0] + rows[1] + rows[2])
    long = [torch.randn(100_003, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert torch.equal(reduced(ReduceOp.AVG, long, into), (long[0] + long[1] + long[2]) / 3)


def test_integers_wrap_around_and_bool_is_added_as_torch_adds_it():
    assert reduced(ReduceOp.SUM, [torch.tensor([127], dtype=torch.int8)] * 2).tolist() == [-2]
    some = [torch.tensor([True, False, True]), torch.tensor([True, False, False])]
    assert torch.equal(reduced(ReduceOp.SUM, some), some[0] + some[1])
    assert reduced(ReduceOp.BXOR, some).tolist() == [False, False, True]


def test_infinities_and_what_is_no_number_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = [torch.tensor([3e38, float("inf"), float("nan")]), torch.tensor([3e38, float("-inf"), 1.0])]
        total = reduced(ReduceOp.SUM, rows)
        assert total[0] == float("inf")
        assert total[1:].isnan().all()
        assert reduced(ReduceOp.MIN, [*rows, rows[0]]).isnan().tolist() == [False, False, True]


def test_what_has_no_exact_meaning_is_refused():
    with pytest.raises(ShapeError):
        reducer_of(ReduceOp.MAX, torch.complex64, 2)
    with pytest.raises(UnsupportedError, match="a reduction is one of"):
        reducer_of(ReduceOp.PREMUL_SUM, torch.float32, 2)
    with pytest.raises(ShapeError, match=r"^group '0': an average of torch.int32"):
        reducer_of(ReduceOp.AVG, torch.int32, 2, "group '0'")


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.BXOR])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_bound_to_its_rows_is_the_same_again_and_again(op, count):
    dtype = torch.int32 if op == ReduceOp.BXOR else torch.float32
    rows = [torch.arange(5).to(dtype) * (k + 3) for k in range(count)]
    out = rows[-1].clone()
    bound = reducer_of(op, dtype, count).bound([Flat(r).elements for r in rows], Flat(out).elements)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            rows[0] += step
            bound()
            assert torch.equal(out, reduced(op, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_reduced_in_two_parts_is_divided_and_rounded_at_the_end(dtype):
    rows = [torch.tensor([256.0, 1.0]).to(dtype) + step for step in (0, 1, 1, 4)]
    mean = reducer_of(ReduceOp.AVG, dtype, 4)
    halves = []
    for first in (0, 2):
        found = [Flat(row).elements for row in rows[first : first + 2]]
        wide = [row.copy() if mean.element.exact else mean.element.widen(row) for row in found]
        mean.unrounded.reduce(wide, wide[0])
        halves.append(wide[0])
    mean.unrounded.reduce(halves, halves[0])
    out = torch.empty(2, dtype=dtype)
    mean.finish(halves[0], Flat(out).elements)
    assert torch.equal(out, torch.stack(rows).float().mean(0).to(dtype))

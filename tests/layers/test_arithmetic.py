"""Several threads of torch compute bitwise what one thread of numpy does."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.layers import arithmetic
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.ops.core.movement import Movement
from distdl_rma.segments import Allreduce, large_arrays
from distdl_rma.segments.collectives.reduction import Reduction, element_of
from distdl_rma.segments.large_arrays import LARGE_NBYTES, by_threads, copy

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38]
DTYPES = ["float32", "float64", "float16", ">f4", "complex64"]
DTYPES += ["int8", "int64", "uint8", "uint16", "uint64", "bool"]


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def by_torch(monkeypatch):
    """Numbers of arrays that torch has looked at, a call each."""
    seen, tensors = [], arithmetic._tensors

    def spied(*args):
        found = tensors(*args)
        if found is not None:
            seen.append(len(found))
        return found

    monkeypatch.setattr(arithmetic, "_tensors", spied)
    return seen


def some(dtype, shape, seed=0):
    draw, dtype = np.random.default_rng(seed), np.dtype(dtype)
    values = (
        draw.integers(0, 100, shape).astype(dtype)
        if dtype.kind in "iub"
        else draw.normal(size=shape).astype(dtype)
    )
    if dtype.kind in "fc":
        with np.errstate(over="ignore"):
            values.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return values


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_equal(dtype):
    whole = some(dtype, (600, 1200))
    parts = {
        "whole": np.s_[:],
        "rows": np.s_[100:500],
        "columns": np.s_[:, 7:1000],
        "every second": np.s_[:, ::2],
        "backwards": np.s_[::-1],
        "small": np.s_[:3, :3],
    }
    for name, part in parts.items():
        for source in (whole[part], np.asfortranarray(whole)[part]):
            source.flags.writeable = name != "rows"
            with threads(2):
                copy(target := np.zeros(source.shape, source.dtype), source)
            assert bits(target) == bits(source), name


def test_torch_copies_what_is_large(by_torch):
    a, b = some("float32", (2, LARGE_NBYTES // 4))
    with threads(2):
        copy(a[:100], b[:100])
        assert by_torch == []
        copy(a, b)
    assert by_torch == [2]
    with threads(1):
        copy(a, b)
    assert by_torch == [2]


def test_types_and_shapes_that_do_not_fit_are_refused_as_by_numpy():
    a = np.zeros(LARGE_NBYTES // 4, np.float32)
    with threads(2):
        with pytest.raises(TypeError):
            copy(a, a.astype(np.float64))
        with pytest.raises(ValueError, match="broadcast"):
            copy(a, a[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [np.add, np.divide, np.minimum])
def test_functions_of_two_operands_are_equal(function, dtype, recwarn):
    if np.dtype(dtype).kind not in "fc" and function is np.divide:
        pytest.skip("a mean of integers is refused")
    a, b = (some(dtype, LARGE_NBYTES, seed) for seed in (1, 2))
    for second in (b, 3) if function is np.divide else (b,):
        with np.errstate(all="ignore"):
            expected = function(a, second, out=np.empty_like(a))
            with threads(2):
                found = by_threads(function)(a, second, out=np.empty_like(a))
        assert bits(found) == bits(expected)


@settings(max_examples=30)
@given(
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int32]
    ),
    st.sampled_from(["sum", "mean", "max"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([5, LARGE_NBYTES // 8, LARGE_NBYTES // 2 + 3, LARGE_NBYTES]),
)
def test_reductions_do_not_depend_on_threads(dtype, op, number, targets, size):
    if (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) or (
        op == "max" and dtype.is_complex
    ):
        return
    element = element_of(reduction_dtype(dtype), "test")
    reduction = Reduction(op, element, number, "test")
    rows = [torch.randn(size).mul(9).to(dtype) for _ in range(number)]
    words = [row.view(torch.uint16).numpy() if dtype == torch.bfloat16 else row.numpy() for row in rows]
    found = []
    for several in (1, 2):
        with threads(several):
            outs = [np.zeros(size, element.storage) for _ in range(targets)]
            reduction.reduce(words, *outs)
            bound = np.zeros(size, element.storage)
            reduction.bound(words, bound)()
            found += [bits(out) for out in (*outs, bound)]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_of_torch_are_those_of_numpy(dtype):
    rows = [torch.randn(3000).mul(100).to(dtype) for _ in range(3)]
    name = str(dtype).removeprefix("torch.")
    words = [row.view(torch.uint16).numpy() if dtype == torch.bfloat16 else row.numpy() for row in rows]
    for op in ("sum", "mean", "max", "prod"):
        found = []
        for element in (element_of(name, "test"), element_of(reduction_dtype(dtype), "test")):
            Reduction(op, element, 3, "test").reduce(words, out := np.zeros(3000, element.storage))
            found.append(bits(out))
        assert found[0] == found[1], op


@pytest.mark.mpi(min_size=2)
def test_ranks_with_several_threads_get_the_same(P_world, comm):
    machine, size = Machine.of(P_world), comm.size
    shape, dims = (size * 40, 6000), {"rows": (size, 1), "columns": (1, size)}
    rows, columns = (Decomposition.balanced(machine.partition(grid), shape) for grid in dims.values())
    torch.manual_seed(1)
    whole = torch.randn(shape)
    movement = Movement(machine, Exchange(comm.rank, rows, columns), torch.float32, "transpose")
    total = Allreduce(machine.segments, tuple(range(size)), 300_000, op="mean", name="several threads")
    found = []
    # Ranks need not have as many threads as others.
    for number in (1, 2, 1 + comm.rank % 2):
        with threads(number):
            found.append(movement.move(whole[rows.slices(comm.rank)].contiguous()).clone())
            total.active[:] = np.random.default_rng(comm.rank).normal(size=300_000)
            total.start()
            found.append(torch.from_numpy(total.wait().copy()))
    assert torch.equal(found[0], whole[columns.slices(comm.rank)])
    for at, one in enumerate(found):
        assert torch.equal(one, found[at % 2])
    movement.close()
    total.close()


def test_without_threads_numpy_copies(monkeypatch):
    monkeypatch.setattr(large_arrays, "_threads", [])
    a, b = some("float32", (2, LARGE_NBYTES))
    copy(a, b)
    assert bits(a) == bits(b)
    assert large_arrays.number_of_threads() == 1

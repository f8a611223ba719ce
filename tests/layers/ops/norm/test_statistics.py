"""Mean and variance over ranks are those of all elements together, whichever way the sums go."""

import numpy as np
import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.norm import statistics
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.layers.ops.norm.statistics import Rows, Statistics

SHAPES = [(3, 4, 50, 41), (2, 3, 1, 1), (5, 0, 7), (4, 70_000), (3, 2, 70_001), (2, 6), (1, 3, 20, 30)]


def some_dims(shape):
    last = len(shape) - 1
    return {(last,), (0, last), tuple(range(1, last + 1)), tuple(range(min(2, last), last + 1)), (0,), ()}


def sums_of(x, dims):
    return x.sum(dims, keepdim=True) if dims else x


def made(P_world, axes, shape, centred=True):
    """Who has which part of a tensor that is cut in its last dimension, and its statistics."""
    machine = Machine.of(P_world)
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    source = Decomposition.balanced(P_x, shape)
    groups = StatisticGroups(axes, source, machine.rank)
    return source, Statistics(CallSite(machine, "test"), groups, centred)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_those_of_torch_in_double_precision(shape, dtype):
    x, y = (torch.randn(shape).to(dtype) for _ in range(2))
    for dims in some_dims(shape):
        found, wide = Rows(shape, dims), x.double()
        for other in (x, y):
            both = found.sums(x, other)
            assert both.dtype == np.float64
            assert both.shape == (2, *found.shape)
            total, products = map(torch.from_numpy, both)
            torch.testing.assert_close(total, sums_of(wide, dims), rtol=1e-5, atol=1e-2)
            exact = sums_of(wide * other.double(), dims)
            torch.testing.assert_close(products, exact, rtol=1e-6, atol=1e-6 if other is x else 1e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_do_not_depend_on_pieces_nor_on_the_place_in_memory(shape, monkeypatch):
    a, b = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    for dims in some_dims(shape):
        exact = torch.stack([sums_of(a, dims), sums_of(a * b, dims)])
        for piece in (1, 3, 8, 1 << 20):
            monkeypatch.setattr(statistics, "_PIECE", piece)
            torch.testing.assert_close(torch.from_numpy(Rows(shape, dims).sums(a, b)), exact)
        apart = a.transpose(0, -1).contiguous().transpose(0, -1)
        for other in (apart, torch._neg_view(-a)):
            torch.testing.assert_close(torch.from_numpy(Rows(shape, dims).sums(other, b)), exact)


@pytest.mark.mpi
@pytest.mark.parametrize(("nbytes", "few"), [(1 << 20, 4), (1 << 20, 1), (0, 1)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("offset", [0, 50])
def test_moments_are_those_of_the_whole_tensor_and_bitwise_alike(
    P_world, comm, monkeypatch, nbytes, few, centred, offset
):
    monkeypatch.setattr(statistics, "_ROUND_NBYTES", nbytes)
    monkeypatch.setattr(statistics, "_FEW_RANKS", few)
    source, found = made(P_world, NormAxes((0, 2), (1,)), (2, 3, 11), centred)
    found.connect()
    for _ in range(3):
        x = torch.randn(2, 3, 11, dtype=torch.float64) + offset
        mean, variance, shifted = found.of(x[source.slices()], lambda kind: None)
        mean, variance = map(torch.from_numpy, (mean, variance))
        expected = x.mean((0, 2), keepdim=True) if centred else torch.zeros(1, 3, 1, dtype=torch.float64)
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(variance, (x - expected).square().mean((0, 2), keepdim=True))
        if offset or not centred:
            assert (shifted is not None) == centred
        assert len(set(comm.allgather(str((mean.tolist(), variance.tolist()))))) == 1
        pair = found.pair()
        for values in pair:
            assert values.shape == (1, 3, 1)
            values[...] = comm.rank + 1.0
        total = comm.size * (comm.size + 1) / 2
        assert all(set(sums.flatten().tolist()) == {total} for sums in found.sum(pair)())


@pytest.mark.mpi
@pytest.mark.parametrize("mean", [0, 1, 1.9, 2.1, 40, 1000])
def test_a_variance_is_exact_in_single_precision_whatever_the_mean(P_world, comm, mean):
    source, found = made(P_world, NormAxes((1, 2), (1,), 2), (2, 6, 9001))
    x = torch.randn(2, 6, 9001) + mean
    mean, variance, _ = found.of(x[source.slices()].contiguous(), lambda kind: None)
    of_groups = x.double().view(2, 2, -1)
    torch.testing.assert_close(torch.from_numpy(mean)[..., 0], of_groups.mean(2), rtol=1e-7, atol=2e-7)
    expected = of_groups.var(2, correction=0)
    torch.testing.assert_close(torch.from_numpy(variance)[..., 0], expected, rtol=5e-7, atol=0)


@pytest.mark.mpi
def test_a_direction_has_memory_from_its_first_use(P_world, comm):
    machine = Machine.of(P_world)
    comm.Barrier()
    before = machine.segments.stats().used
    source, found = made(P_world, NormAxes((2,), (1,)), (2, 3, 11))
    assert machine.segments.stats().used == before
    found.of(torch.randn(2, 3, 11)[source.slices()], lambda kind: None)
    forward = machine.segments.stats().used
    assert (forward > before) == (comm.size > 1)
    found.sum(found.pair())()
    assert (machine.segments.stats().used > forward) == (comm.size > 1)

"""Normalisation by the operator alone, and by every layer: rounding, short types, messages and autograd."""

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import (
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.norm import statistics
from distdl_rma.layers.ops.norm.normalisation import Normalisation, NormOptions, by_constants
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1, 3), (1, 2, 3, 4), (2, 2, 1, 2), (2, 2, 1, 3, 2), (2, 2, 3), (1, 2), (0, 2, 3)]
)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_values_of_channels_are_constants_however_a_block_lies_in_memory(shape, transposed):
    x, gradient = (
        torch.randn(shape, dtype=torch.float64).transpose(1, -1).contiguous().transpose(1, -1)
        if strided
        else torch.randn(shape, dtype=torch.float64)
        for strided in transposed
    )
    x.requires_grad_()
    mean, variance, weight, bias = (torch.rand(2, dtype=torch.float64) + 0.5 for _ in range(4))
    weight.requires_grad_()
    y = by_constants(x, (mean, variance, weight, bias), 1e-5)
    y.backward(gradient)
    column = 1, -1, *(1,) * (len(shape) - 2)
    xhat, factor = (x.detach() - mean.view(column)) * (variance + 1e-5).rsqrt().view(column), weight.detach()
    torch.testing.assert_close(y, xhat * factor.view(column) + bias.view(column))
    torch.testing.assert_close(x.grad, gradient * (factor * (variance + 1e-5).rsqrt()).view(column))
    others = [d for d in range(len(shape)) if d != 1]
    torch.testing.assert_close(weight.grad, (gradient * xhat).sum(others))


def test_inputs_that_do_not_fit_are_refused_when_it_is_made(P_world, comm):
    axes, site = NormAxes((0, 2), (1,)), CallSite(Machine.of(P_world), "test")
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    store = Decomposition.replicated(P_world, (6,))
    options = NormOptions(axes, function="batch_norm")
    for shape, dtype, message in (
        ((2, 6, 10), torch.int64, "floating-point type is needed, got torch.int64"),
        ((2, 5, 10), torch.float32, r"has extents \(5,\) in dimensions \(1,\), the layer takes \(6,\)"),
        (
            (1, 6, 1),
            torch.float32,
            r"more than 1 value per channel .* the global input is \(1, 6, 1\)",
        ),
    ):
        with pytest.raises(ShapeError, match=message):
            Normalisation(site, Decomposition.balanced(P_x, shape), dtype, options, store, {})


# Kind, its sequential twin, arguments, and the grid over n ranks, for inputs of SHAPE.
SHAPE = (4, 6, 40)
KINDS = {
    "batch": (DistributedBatchNorm1d, nn.BatchNorm1d, (6,), lambda n: (1, 1, n)),
    "batch, split batch": (DistributedBatchNorm1d, nn.BatchNorm1d, (6,), lambda n: (n, 1, 1)),
    "batch, split channels": (DistributedBatchNorm1d, nn.BatchNorm1d, (6,), lambda n: (1, n, 1)),
    "instance": (DistributedInstanceNorm1d, nn.InstanceNorm1d, (6, 1e-5, 0.1, True), lambda n: (1, 1, n)),
    "group": (DistributedGroupNorm, nn.GroupNorm, (2, 6), lambda n: (1, n, 1)),
    "layer": (DistributedLayerNorm, nn.LayerNorm, ((6, 40),), lambda n: (1, 1, n)),
    "layer, split batch": (DistributedLayerNorm, nn.LayerNorm, (40,), lambda n: (n, 1, 1)),
    "rms": (DistributedRMSNorm, nn.RMSNorm, ((6, 40),), lambda n: (1, n, 1)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["one round", "two sums"])
def way(request, monkeypatch):
    """Statistics of few and of many bytes go different ways."""
    if request.param == "two sums":
        monkeypatch.setattr(statistics, "_ROUND_NBYTES", 0)
    return request.param


def twins(P_world, kind, dtype):
    """Distributed layer, sequential layer, and partition, with equal random weights."""
    distributed, sequential, arguments, grid = KINDS[kind]
    P_x = P_world.create_cartesian_topology_partition(grid(P_world.size))
    layer, twin = distributed(P_x, *arguments, dtype=dtype), sequential(*arguments, dtype=dtype)
    for key, parameter in twin.named_parameters():
        parameter.data = (torch.rand(parameter.shape) + 0.5).to(dtype)
        store = layer.placed.placements[key].store
        getattr(layer, key).data.copy_(parameter.data[store.slices()])
    return layer, twin, P_x


def step(module, x, gradient):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(gradient)
    return y.detach(), x.grad


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_large_mean_costs_no_digits(P_world, comm, kind, way, dtype):
    layer, twin, P_x = twins(P_world, kind, dtype)
    x, gradient = (torch.randn(SHAPE, dtype=dtype) for _ in range(2))
    x, exact = x + 1e4, twin.double()
    expected = step(exact, x.double(), gradient.double())
    mine = step(layer, shard(P_x, x), shard(P_x, gradient))
    for actual, wanted in zip(mine, expected, strict=True):
        # In double the data are known to 1e-12 of their deviation only, and torch's own mean to 1e-11.
        limit = 1e-10 if dtype == torch.float64 else 1e-3 * float(wanted.abs().max())
        torch.testing.assert_close(actual.double(), shard(P_x, wanted), rtol=0, atol=limit)
    for key, parameter in exact.named_parameters() if dtype == torch.float32 else ():
        wanted = parameter.grad[layer.placed.placements[key].store.slices()]
        worst = (getattr(layer, key).grad.double() - wanted).abs().max()
        assert worst < 1e-3 * parameter.grad.abs().max(), key


def test_rms_norm_without_eps_adds_the_resolution_of_the_type(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.full((2, 8), 1e-4, dtype=dtype)
        y = DistributedRMSNorm(P_x, 8, dtype=dtype)(shard(P_x, x))
        torch.testing.assert_close(y, shard(P_x, nn.RMSNorm(8, dtype=dtype)(x)))


def test_each_direction_is_one_message_to_each_rank_that_shares(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedBatchNorm1d(P_x, 3, affine=False)
    counters, others = Machine.of(P_world).segments.counters, comm.size - 1
    x = torch.randn(2, 3, 5, requires_grad=True)
    layer(x).sum().backward()
    layer.eval()(x)
    comm.Barrier()
    before = counters.puts
    layer(x)
    # In evaluation nothing travels but what the ranks agree on.
    agreed = counters.puts - before
    layer.train()(x)
    before = counters.puts
    y = layer(x)
    assert counters.puts - before == agreed + others
    y.sum().backward()
    assert counters.puts - before == agreed + 2 * others
    split = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    alone = DistributedLayerNorm(split, (3, 5), elementwise_affine=False)
    alone(x).sum().backward()
    before = counters.puts
    alone(x).sum().backward()
    assert counters.puts - before == agreed, "instances have nothing else to do with each other"


@pytest.mark.mpi(min_size=2)
def test_gradients_of_whole_weights_lie_in_the_segment(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    model = nn.Sequential(DistributedBatchNorm2d(P_x, 4), DistributedGroupNorm(P_x, 2, 4))
    memory = Machine.of(P_world).segments.segment.memory
    begin = memory.ctypes.data
    sync = GradientSync(model, P_world)
    model(torch.randn(2, 4, 3, 5)).sum().backward()
    for parameter in model.parameters():
        assert begin <= parameter.grad.data_ptr() < begin + memory.nbytes
    sync.close()

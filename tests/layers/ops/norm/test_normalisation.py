"""Normalisation by the operator alone, and by every layer: rounding, short types, messages and autograd."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedBatchNorm1d, DistributedLayerNorm, DistributedRMSNorm
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.norm import statistics
from distdl_rma.layers.ops.norm.normalisation import Normalisation, NormOptions, by_constants
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes
from tests.layers.partitioned.random_shards import cut
from tests.layers.partitioned.sequential import shard
from tests.layers.partitioned.twins import Form, Twins, features, lines, vectors

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
    # Torch's own kernel is wrong where a block could lie in several ways.
    shift, scale, factor, offset = (
        each.view(1, -1, *(1,) * (len(shape) - 2)) for each in (mean, (variance + 1e-5).rsqrt(), weight, bias)
    )
    both = y, (x - shift) * scale * factor + offset
    torch.testing.assert_close(*([y, *torch.autograd.grad(y, (x, weight), gradient)] for y in both))


def test_inputs_that_do_not_fit_are_refused_when_it_is_made(P_world, comm):
    axes, site = NormAxes((0, 2), (1,)), CallSite(Machine.of(P_world), "test")
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    store = Decomposition.replicated(P_world, (6,))
    options = NormOptions(axes, function="batch_norm")
    for shape, dtype, message in (
        ((2, 6, 10), torch.int64, "floating-point type is needed, got torch.int64"),
        ((2, 5, 10), torch.float32, r"has extents \(5,\) in dimensions \(1,\), the layer takes \(6,\)"),
        ((1, 6, 1), torch.float32, r"more than 1 value per channel .* the global input is \(1, 6, 1\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            Normalisation(site, Decomposition.balanced(P_x, shape), dtype, options, store, {})


SHAPE = (4, 6, 40)
FORMS = {
    "batch": Form("BatchNorm1d", (6,), {}, (features,), shape=SHAPE),
    "batch, split batch": Form("BatchNorm1d", (6,), {}, (vectors,), shape=SHAPE),
    "batch, split channels": Form("BatchNorm1d", (6,), {}, (lines,), shape=SHAPE),
    "instance": Form("InstanceNorm1d", (6, 1e-5, 0.1, True), {}, (features,), shape=SHAPE),
    "group": Form("GroupNorm", (2, 6), {}, (lines,), shape=SHAPE),
    "layer": Form("LayerNorm", ((6, 40),), {}, (features,), shape=SHAPE),
    "layer, split batch": Form("LayerNorm", (40,), {}, (vectors,), shape=SHAPE),
    "rms": Form("RMSNorm", ((6, 40),), {}, (lines,), shape=SHAPE),
}


@pytest.fixture(params=["one round", "two sums"])
def way(request, monkeypatch):
    """Statistics of few and of many bytes go different ways."""
    if request.param == "two sums":
        monkeypatch.setattr(statistics, "_ROUND_NBYTES", 0)
    return request.param


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_large_mean_costs_no_digits(P_world, form, way, dtype):
    twins = Twins(P_world, form, dtype)
    twins.twin.double()
    x, gradient = 1e4 + torch.randn(SHAPE, dtype=dtype), torch.randn(SHAPE, dtype=dtype)
    local, whole = twins.into(x).requires_grad_(), x.double().requires_grad_()
    y, expected = twins.layer(local), twins.twin(whole)
    y.backward(twins.out(gradient))
    expected.backward(gradient.double())

    def near(actual, wanted, part):
        # In double the data are known to 1e-12 of their deviation only, and torch's own mean to 1e-11.
        limit = 1e-10 if dtype == torch.float64 else 1e-3 * float(wanted.detach().abs().max())
        torch.testing.assert_close(actual.detach().double(), part(wanted), rtol=0, atol=limit)

    near(y, expected, twins.out)
    near(local.grad, whole.grad, twins.into)
    for key, parameter in twins.twin.named_parameters() if dtype == torch.float32 else ():
        store = twins.layer.placed.placements[key].store
        near(getattr(twins.layer, key).grad, parameter.grad, partial(cut, store))


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

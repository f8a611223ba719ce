"""The operator alone, on tensors whose decomposition is known: no layer, no agreement."""

from types import MappingProxyType

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions, by_constants
from distdl_rma.ops.norm.statistic_groups import NormAxes

pytestmark = pytest.mark.mpi
SHAPE, CHANNELS = (2, 6, 10), 6
# Axes, and the function of torch on (x, weight, bias).
KINDS = MappingProxyType(
    {
        "batch": (NormAxes((0, 2), (1,)), lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
        "instance": (NormAxes((2,), (1,)), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
        "group": (NormAxes((1, 2), (1,), 2), lambda x, w, b: F.group_norm(x, 2, w, b)),
        "layer": (NormAxes((2,), (2,)), lambda x, w, b: F.layer_norm(x, (10,), w, b)),
    }
)


def operation_of(P_world, kind, grid, **options):
    axes, function = KINDS[kind]
    P_x = P_world.create_cartesian_topology_partition(grid(P_world.size))
    source = Decomposition.balanced(P_x, SHAPE)
    store = Decomposition.replicated(P_world, tuple(SHAPE[d] for d in axes.weighted))
    site, types = CallSite(Machine.of(P_world), "test"), {"weight": torch.float64, "bias": torch.float64}
    made = Normalisation(site, source, torch.float64, NormOptions(axes, **options), store, types)
    return made, function, source, store.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [lambda n: (1, 1, n), lambda n: (1, n, 1), lambda n: (n, 1, 1)])
def test_a_normalisation_of_a_split_tensor_is_that_of_the_whole(P_world, comm, kind, grid):
    operation, function, source, extents = operation_of(P_world, kind, grid)
    assert operation.output == source
    operation.connect()
    x, gradient = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(extents, dtype=torch.float64, requires_grad=True) for _ in range(2))
    whole = x.clone().requires_grad_()
    expected = function(whole, weight.detach(), bias.detach())
    expected.backward(gradient)
    local = x[source.slices()].clone().requires_grad_()
    y = operation(GradientNeeds(True, True), local, weight=weight, bias=bias)
    y.backward(gradient[source.slices()])
    torch.testing.assert_close(y, expected[source.slices()])
    torch.testing.assert_close(local.grad, whole.grad[source.slices()])
    # Each rank has its own part of the gradient; who keeps copies sums it.
    total = torch.from_numpy(comm.allreduce(bias.grad.numpy()))
    dims = [d for d in range(3) if d not in KINDS[kind][0].weighted]
    torch.testing.assert_close(total, gradient.sum(dims))


def test_running_statistics_are_constants(P_world, comm):
    operation, _, source, _ = operation_of(P_world, "batch", lambda n: (1, 1, n), by_batch=False)
    x = torch.randn(SHAPE, dtype=torch.float64)
    mean, variance = torch.randn(CHANNELS), torch.rand(CHANNELS) + 0.5
    local = x[source.slices()].clone().requires_grad_()
    y = operation(GradientNeeds(True, False), local, running_mean=mean, running_var=variance)
    y.sum().backward()
    expected = F.batch_norm(x, mean.double(), variance.double())
    torch.testing.assert_close(y, expected[source.slices()])
    slope = (variance.double() + 1e-5).rsqrt().view(1, -1, 1).expand(SHAPE)
    torch.testing.assert_close(local.grad, slope[source.slices()])


@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 3), (1, 2, 3, 4), (2, 2, 3), (1, 2), (0, 2, 3)])
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
    store = Decomposition.replicated(P_world, (CHANNELS,))
    options = NormOptions(axes, several="value is needed")
    for shape, dtype, message in (
        (SHAPE, torch.int64, "floating-point type is needed, got torch.int64"),
        ((2, 5, 10), torch.float32, r"has extents \(5,\) in dimensions \(1,\), the layer takes \(6,\)"),
        ((1, 6, 1), torch.float32, r"more than 1 value is needed, the global input is \(1, 6, 1\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            Normalisation(site, Decomposition.balanced(P_x, shape), dtype, options, store, {})

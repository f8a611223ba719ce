"""The operator alone, on tensors whose decomposition is known: no layer, no agreement."""

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions, by_constants
from distdl_rma.ops.norm.statistic_groups import NormAxes

pytestmark = pytest.mark.mpi
SHAPE, CHANNELS = (2, 6, 10), 6


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
    store = Decomposition.replicated(P_world, (CHANNELS,))
    options = NormOptions(axes, several="value is needed")
    for shape, dtype, message in (
        (SHAPE, torch.int64, "floating-point type is needed, got torch.int64"),
        ((2, 5, 10), torch.float32, r"has extents \(5,\) in dimensions \(1,\), the layer takes \(6,\)"),
        ((1, 6, 1), torch.float32, r"more than 1 value is needed, the global input is \(1, 6, 1\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            Normalisation(site, Decomposition.balanced(P_x, shape), dtype, options, store, {})

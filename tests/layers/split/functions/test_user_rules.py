"""Rules of a user's own, for functions and modules."""

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, SplitTensor, UnsupportedError, register
from distdl_rma.layers.split.calls.table import RULES
from tests.layers.split.against_whole import check, cut_along, numbers


@pytest.mark.mpi
def test_rules_of_a_users_own(P_world):
    x = torch.randn(2, 3, 13, 11, dtype=torch.float64)

    class Mine(nn.Module):
        def forward(self, x):
            return x.untyped_storage()

    def doubled(module, x):
        return SplitTensor.from_local(x.to_local() * 2, x.partition)

    register(Mine, doubled)
    register(
        torch.special.spherical_bessel_j0,
        lambda function, x: SplitTensor.from_local(function(x.to_local()), x.partition),
    )
    s, bessel = cut_along(P_world, 2, x), torch.special.spherical_bessel_j0
    torch.testing.assert_close(Mine()(s).full_tensor(), x * 2)
    torch.testing.assert_close(bessel(s).full_tensor(), bessel(x))


class Floor(torch.autograd.Function):
    """By numpy, which sees no split tensor; straight through, but for elements where a mask is zero."""

    @staticmethod
    def forward(ctx, x, scale, pair, digits=0):
        mask, shift = pair
        ctx.save_for_backward(x, scale, mask)
        y = torch.from_numpy(np.floor((x * scale + shift).detach().numpy() * 10**digits) / 10**digits)
        return y, y > 0

    @staticmethod
    def backward(ctx, g, _):
        x, scale, mask = ctx.saved_tensors
        g = g * mask
        return g * scale, (g * x).sum_to_size(scale.shape), None, None


@pytest.mark.mpi
def test_autograd_functions_of_single_elements(P_world):
    register(Floor, elementwise=True)
    register(Floor, elementwise=True)

    def function(x, scale):
        y, positive = Floor.apply(x, scale, [x > -0.5, 2], 1)
        return y + x, positive

    for shape in ((2, 3, 7, 5), (2, 1, 3)):
        check(P_world, function, [numbers(*shape)], [numbers(shape[-1])])
        check(P_world, function, [numbers(*shape), numbers(1, *shape[1:])])

    class Other(Floor):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            return g.expand(2, 6)

    check(P_world, lambda x: Other.apply(x) * 2, [numbers(2, 6)])


@pytest.mark.mpi
@pytest.mark.processes
def test_functions_of_single_elements(P_world, monkeypatch):
    monkeypatch.setitem(RULES, torch.special.airy_ai, None)
    register(torch.special.airy_ai, elementwise=True)
    check(P_world, torch.special.airy_ai, [numbers(2, 3, 7, 5).detach()])
    register(torch.special.airy_ai, lambda function, x: x * 2)
    airy = torch.special.airy_ai
    check(P_world, lambda x: airy(x) if type(x) is not torch.Tensor else x * 2, [numbers(3, 5)])


@pytest.mark.mpi
def test_what_is_not_elementwise_is_refused_by_all(P_world):
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

    register(Total, elementwise=True)
    x = cut_along(P_world, 1, torch.randn(3, 7))
    with pytest.raises(UnsupportedError, match=r"Total.*registered as elementwise, and returns \(\)"):
        Total.apply(x)


def test_a_rule_is_a_handler_or_elementwise():
    for arguments in ({}, {"elementwise": True, "handler": print}):
        with pytest.raises(ArgumentError, match="takes a handler, or elementwise=True"):
            register(torch.special.i0, **arguments)
    with pytest.raises(ArgumentError, match="as elementwise, got"):
        register(nn.ReLU, elementwise=True)
    with pytest.raises(ArgumentError, match="takes a function or a class"):
        register(3, lambda: None)

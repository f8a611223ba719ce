"""The operator of transposed convolutions, called on tensors of known decompositions, without a layer."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition, Stencil
from distdl_rma.geometry.halo import ContributorsSplit, Window
from distdl_rma.geometry.intervals import Listed
from distdl_rma.ops.conv.conv_transpose import (
    TransposedConvolution,
    crop,
    least_outputs,
    output_padding_for,
)
from distdl_rma.ops.conv.worker_grid import IN, ConvolutionOptions, WorkerGrid
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from tests.layers.sequential import agree

STENCIL = Stencil.of((3, 4), (2, 3), (1, 2), ((1, 1), (0, 0)))
# Grids of input, output and work (batch, out-channel, in-channel, *space); whether data stay where they are.
FORMS = {
    "feature": lambda n: ((1, 1, n, 1), (1, 1, n, 1), (1, 1, 1, n, 1), True),
    "in-channels": lambda n: ((1, n, 1, 1), (1, 1, n, 1), (1, 1, n, 1, 1), True),
    "general": lambda n: ((1, 1, n, 1), (1, 1, 1, n), (1, n, 1, 1, 1), False),
}


@pytest.mark.mpi
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_torch(P_world, comm, form):
    first, second, work, on_workers = FORMS[form](comm.size)
    P_x, P_y, grid = (P_world.create_cartesian_topology_partition(shape) for shape in (first, second, work))
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 5, 4), (4, 6, 3, 4), (6,))
    )
    y = F.conv_transpose2d(x, weight, bias, (2, 3), (1, 0), (1, 2), 1, (1, 2))
    d_y = torch.randn_like(y)
    y.backward(d_y)
    source = Decomposition.balanced(P_x, x.shape)
    operation = TransposedConvolution(
        CallSite(Machine.of(P_world), form),
        ConvolutionOptions(STENCIL, WorkerGrid(grid, IN, 1, tuple(weight.shape)), on_workers=on_workers),
        source,
        P_y,
        torch.float64,
        (1, 2),
    )
    assert operation.output.shape == y.shape
    local = x.detach()[source.slices()].clone().requires_grad_()
    weights = {"weight": weight.detach().clone(), "bias": bias.detach().clone()}
    out = operation(GradientNeeds(True, True), local, **weights)
    agree(out, y.detach()[operation.output.slices()], "output")
    out.backward(d_y[operation.output.slices()])
    agree(local.grad, x.grad[source.slices()], "input gradient")


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_block_of_outputs_is_what_torch_makes_of_the_inputs_that_add_to_it(random):
    kernel, stride, dilation, n = (random.randint(1, most) for most in (5, 4, 3, 12))
    span = dilation * (kernel - 1) + 1
    padding, extra = random.randint(0, span), random.randrange(max(stride, dilation))
    extent = (n - 1) * stride - 2 * padding + span + extra
    assume(extent > 0)
    x, weight = (torch.randn(1, 1, width, dtype=torch.float64) for width in (n, kernel))
    y = F.conv_transpose1d(x, weight, None, stride, padding, extra, 1, dilation)
    start = random.randrange(extent)
    outputs, window = (start, random.randint(start + 1, extent)), Window(kernel, stride, dilation, padding)
    parts = Listed((start, outputs[1] - start))
    inputs = ContributorsSplit(parts, window, n, random.randrange(3)).interval(1)
    held = [x[..., i : i + 1] if 0 <= i < n else torch.zeros(1, 1, 1) for i in range(*inputs)]
    before, behind, crops, more = crop(window, inputs, outputs)
    block = F.pad(torch.cat([torch.empty(1, 1, 0, dtype=torch.float64), *held], 2), (before, behind))
    found = F.conv_transpose1d(block, weight, None, stride, crops, more, 1, dilation)
    torch.testing.assert_close(found, y[..., slice(*outputs)])


@pytest.mark.parametrize("inputs", [(1, 1), (5, 4), (2, 9)])
def test_output_padding_makes_the_output_as_large_as_it_is_asked_for(inputs):
    least = least_outputs(STENCIL, inputs)
    expected = F.conv_transpose2d(
        torch.zeros(1, 1, *inputs), torch.zeros(1, 1, 3, 4), None, (2, 3), (1, 0), 0, 1, (1, 2)
    )
    assert least == expected.shape[2:]
    for extra in ((0, 0), (1, 2)):
        wanted = tuple(n + more for n, more in zip(least, extra, strict=True))
        assert output_padding_for(STENCIL, inputs, wanted) == extra
        assert output_padding_for(STENCIL, inputs, (7, 1, *wanted)) == extra
    for size, message in (
        ((least[0] - 1, least[1]), "is not between"),
        (least[:1], "has 1 numbers, it needs 2"),
    ):
        with pytest.raises(ShapeError, match=message):
            output_padding_for(STENCIL, inputs, size)

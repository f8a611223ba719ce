"""Own data and halo in one tensor: one convolution of it, and its adjoint, are parts of the whole ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, shard
from distdl_rma.ops.conv import joined_tile
from distdl_rma.ops.conv.kernels import ConvolutionArguments, convolution, convolution_adjoint
from distdl_rma.split import SplitTensor
from tests.ops.conv.test_own_and_halo import random_parts


@pytest.mark.parametrize("seed", range(30))
def test_one_convolution_of_a_tile_is_its_part_of_the_whole(seed):
    torch.manual_seed(seed)
    stencil, parts, (low, high) = random_parts(random.Random(seed))
    tile = parts.joined
    x = torch.randn(parts.domain.shape, dtype=torch.float64)
    weight = torch.randn(2, high - low, *(w.kernel for w in stencil.windows), dtype=torch.float64)
    # All that is read, with zeros beyond the domain.
    reads = parts.stencil.reads(parts.outputs)
    inside = reads & parts.domain
    whole = torch.zeros(reads.shape, dtype=torch.float64)
    whole[inside.slices(reads)] = x[inside.slices(parts.domain)]
    data = tile.hold(x.dtype)
    zeros = torch.ones(data.shape, dtype=torch.bool)
    zeros[tile.crop] = False
    assert not data[zeros].any()
    data[tile.crop] = x[inside.slices(parts.domain)]
    plain = ConvolutionArguments.of(stencil, 1)
    exactly = {"rtol": 1e-11, "atol": 1e-11}
    y = convolution(whole, weight, None, plain)
    torch.testing.assert_close(tile.convolve(data, weight), y, **exactly)
    gradient, needs = torch.randn_like(y), (True, True, False)
    expected, wanted, _ = convolution_adjoint(gradient, whole, weight, plain, needs)
    found, taps, _ = tile.convolve_adjoint(gradient, data, weight, needs)
    torch.testing.assert_close(taps, wanted, **exactly)
    torch.testing.assert_close(found[tile.crop], expected[inside.slices(reads)], **exactly)


CASES = {
    "rows": ((0, 1), (1, 2, 12, 9), (3, 3), {"padding": 1}),
    "columns": ((1, 0), (2, 2, 9, 12), (3, 3), {"padding": 1}),
    "dilated": ((0, 1), (1, 2, 17, 8), (3, 2), {"padding": (2, 0), "dilation": (2, 1)}),
    "jumps": ((0, 1), (1, 2, 13, 9), (3, 3), {"padding": 1, "stride": 2}),
    "of groups": ((0, 1), (1, 4, 12, 9), (5, 3), {"padding": (2, 1), "groups": 2}),
    "less than a window each": ((0, 1), (1, 2, 3, 9), (3, 3), {"padding": 1}),
}


@pytest.mark.mpi
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_split_convolutions_are_those_of_the_whole(P_world, monkeypatch, case, kept):
    # Tiles are kept for the backward, or joined again in it.
    monkeypatch.setattr(joined_tile, "SMALLEST_NBYTES", 1 << 18 if kept else 0)
    axes, shape, kernel, how = CASES[case]
    machine = Machine.of(P_world)
    P_x = machine.partition((1, 1, *(machine.size if axis else 1 for axis in reversed(axes))))
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, shape[1] // how.get("groups", 1), *kernel, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    twins = [w.clone().requires_grad_() for w in (weight, bias)]
    expected = F.conv2d(x, *twins, **how)
    expected.square().sum().backward()
    cut = shard(P_x, x.detach())
    block = cut.to_local().clone().requires_grad_()
    for parameter in (weight, bias):
        parameter.requires_grad_()
    y = F.conv2d(SplitTensor(block, cut.decomposition), weight, bias, **how)
    y.square().sum().backward()
    exactly = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(y.full_tensor(), expected, **exactly)
    torch.testing.assert_close(block.grad, shard(P_x, x.grad).to_local(), **exactly)
    for mine, theirs in zip((weight, bias), twins, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **exactly)

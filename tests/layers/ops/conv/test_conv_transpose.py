"""The operator of transposed convolutions, called on tensors of known decompositions, without a layer."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.geometry import Stencil
from distdl_rma.geometry.halo import ContributorsSplit, Window
from distdl_rma.geometry.intervals import Listed
from distdl_rma.layers.ops.conv.conv_transpose import (
    crop,
    least_outputs,
    output_padding_for,
)

STENCIL = Stencil.of((3, 4), (2, 3), (1, 2), ((1, 1), (0, 0)))


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

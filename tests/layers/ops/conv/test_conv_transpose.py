"""The operator of transposed convolutions, called on tensors of known decompositions, without a layer."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.geometry import Stencil
from distdl_rma.layers.ops.conv.conv_transpose import least_outputs, output_padding_for

STENCIL = Stencil.of((3, 4), (2, 3), (1, 2), ((1, 1), (0, 0)))


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

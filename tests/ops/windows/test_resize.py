"""Resizing of tensors of known decompositions."""

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError
from distdl_rma.ops.windows.resize import ResizeOptions, Resizing
from tests.fuzz.pooling import Resized
from tests.ops.windows.known_input import equals_sequential, rows


@pytest.mark.parametrize("recompute", [None, True])
def test_the_factor_decides_where_outputs_lie_unless_it_is_computed_anew(recompute):
    (resize,) = ResizeOptions(None, (1.3,), "linear", recompute_scale_factor=recompute).resizes((5,))
    assert (resize.extent, resize.outputs, resize.scale) == (5, 6, None if recompute else 1.3)


def test_nothing_cannot_be_resized():
    for options, extents in (
        (ResizeOptions((3,), None, "linear"), (0,)),
        (ResizeOptions(None, (0.2,), "linear"), (4,)),
    ):
        with pytest.raises(ShapeError, match=r"cannot resize .* both need elements"):
            options.resizes(extents)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(11, 3), (2, 8)])
def test_outputs_and_gradients_are_those_of_the_whole(P_world, mode, size):
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    options = ResizeOptions(size, None, mode, None if mode == "nearest" else False)
    reference = Resized(nn.Upsample(size, mode=mode))
    equals_sequential(rows(P_world, 2), Resizing, options, x, reference)

"""Resizing: positions of outputs, parts resized as the whole, and what moves."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.ops import resizing
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.resizing import Resize, ResizeOptions, Resizing


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


LINES = {"nearest": 1, "nearest-exact": 1, "linear": 1, "bicubic": 2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(
    st.integers(1, 40),
    st.one_of(st.sampled_from([2.0, 4.0, 8.0, 0.5, 0.25, 1.0, 3.0, 1.5, 1.3, 0.7]), st.integers(1, 60)),
    st.sampled_from(sorted(LINES)),
    st.booleans(),
    st.data(),
)
def test_a_part_is_resized_as_the_whole(dtype, n, wanted, mode, corners, data):
    sized = isinstance(wanted, int)
    m = wanted if sized else int(n * wanted)
    assume(m > 0)
    start = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(start + 1, m))
    resize_part(dtype, n, wanted, mode, corners and not mode.startswith("nearest"), start, stop)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_every_small_part_has_the_neighbours_of_the_whole(mode, dims):
    # Kernels do not look at the factor where one size is the other one, or double of it.
    for n, m in itertools.product(range(1, 8), range(1, 14)):
        for start, stop in itertools.combinations(range(m + 1), 2):
            resize_part(torch.float32, n, m, mode, False, start, stop, dims)


def resize_part(dtype, n, wanted, mode, corners, start, stop, dims=None):
    sized = isinstance(wanted, int)
    m = wanted if sized else int(n * wanted)
    dims = dims or LINES[mode]
    ones = (1,) * (dims - 1)
    x = torch.randn(2, 3, *ones, n, dtype=dtype)
    expected = F.interpolate(
        x,
        size=(*ones, m) if sized else None,
        scale_factor=None if sized else (*map(float, ones), wanted),
        mode=mode,
        align_corners=None if mode.startswith("nearest") else corners,
    )[..., start:stop]
    resize = Resize(n, m, None if sized else wanted, corners)
    by_taps = resize.factor is None or (resize.factor == 1 and mode == "bicubic")
    line = resizing._ResizedLine(mode, dims, resize, True, by_taps, dtype)
    first, last = line.window.reads(start, stop)
    part = line.part((start, stop), (first, last))
    y = x[..., first:last]
    if part.taps is None:
        aligned = () if mode.startswith("nearest") else (corners,)
        scales = (*(None,) * len(ones), part.scale)
        y = resizing._KERNELS[mode][dims](y, (*ones, part.size), *aligned, *scales)[..., part.inside]
        # Positions are those of the whole, exactly.
        assert torch.equal(y, expected)
    else:
        torch.testing.assert_close(part.taps.apply(y, y.dim() - 1), expected)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_copies_by_whole_factors_move_nothing(P_world, mode):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    source, site = Decomposition.balanced(P_x, (2, 3, 4 * P_world.size, 5)), CallSite(Machine.of(P_x), "it")
    options = ResizeOptions(None, (2.0, 3.0), mode)
    assert Resizing(site, source, P_x, torch.float64, options).gather is None

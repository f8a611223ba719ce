"""Windows: pooled where the outputs will be, adaptive ones, and resizing."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.halo import TableWindow
from distdl_rma.layers.ops import windows
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.windows import (
    Interpolation,
    Resize,
    ResizeOptions,
    Resizing,
    _contributions,
    _even,
    argmax_windows,
    extents_to_pool,
    flat_index,
    gather_at,
    outer_product,
)
from tests.layers.partitioned.sequential import agree


def test_there_must_be_something_to_pool():
    assert extents_to_pool((0, 2, 3, 4)) == (3, 4)
    with pytest.raises(ShapeError, match=r"the global input \(1, 2, 0, 4\) has no elements to pool"):
        extents_to_pool((1, 2, 0, 4))


def test_divisors_are_products_over_the_dimensions():
    assert torch.equal(
        outer_product([[1, 2], [3, 5, 7]], torch.float32), torch.tensor([[3.0, 5, 7], [6, 10, 14]])
    )
    assert outer_product([[1, 2], []], torch.float64).shape == (2, 0)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_coordinates_are_those_of_torchs_indices(kernel, stride, dilation, seed):
    torch.manual_seed(seed)
    x = torch.randint(0, 4, (2, 3, 7, 6)).double()
    expected, index = F.max_pool2d(x, kernel, stride, 0, dilation, return_indices=True)
    found = argmax_windows(x, [kernel] * 2, [stride] * 2, [dilation] * 2)
    assert torch.equal(flat_index(found, x.shape[2:]), index)
    assert torch.equal(gather_at(x, found), expected)


def test_the_first_of_equal_elements_counts_and_nan_above_all():
    x = torch.tensor([1.0, 1.0, float("inf"), float("nan"), 5.0, 5.0]).view(1, 1, -1)
    (found,) = argmax_windows(x, [2], [2], [1])
    assert found.flatten().tolist() == [0, 3, 4]


def test_the_gradient_of_an_element_that_wins_twice_is_summed():
    x = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64).view(1, 1, -1).requires_grad_()
    gather_at(x, argmax_windows(x, [2], [1], [1])).sum().backward()
    assert x.grad.flatten().tolist() == [0.0, 2.0, 0.0]


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_contributions_of_all_parts_make_every_window(n, m, data):
    window = TableWindow.adaptive(n, m)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    read = []
    for own in zip([0, *cuts], [*cuts, n], strict=True):
        sums = window.readers(*own) if own[0] < own[1] else (0, 0)
        inputs, outputs, count = _contributions(window, own, sums)
        assert count == sums[1] - sums[0]
        read += [(j + sums[0], i + own[0]) for i, j in zip(inputs.tolist(), outputs.tolist(), strict=True)]
    assert sorted(read) == [(j, i) for j in range(m) for i in range(window.first[j], window.last[j] + 1)]


@given(st.integers(1, 12), st.integers(1, 12))
def test_even_windows_repeat_first_inputs_only(n, m):
    window = TableWindow.adaptive(n, m)
    for j, row in enumerate(_even(window, 0, m).tolist()):
        assert sorted(set(row)) == list(range(window.first[j], window.last[j] + 1))
        assert row == sorted(row)
        assert len(set(row[row.count(row[0]) - 1 :])) == len(row) - row.count(row[0]) + 1


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
resized = given(st.integers(1, 9), st.integers(1, 14), st.sampled_from(sorted(LINES)), st.booleans())


def taps(n, m, mode, corners):
    corners = corners and not mode.startswith("nearest")
    return Interpolation.of(mode, LINES[mode], Resize(n, m, None, corners), torch.float64), corners


@resized
def test_a_line_is_resized_as_by_torch_and_a_part_from_what_it_reads(n, m, mode, corners):
    interpolation, corners = taps(n, m, mode, corners)
    ones, window = (1,) * (LINES[mode] - 1), interpolation.window
    x = torch.randn(2, 3, *ones, n, dtype=torch.float64)
    aligned = None if mode.startswith("nearest") else corners
    expected = F.interpolate(x, size=(*ones, m), mode=mode, align_corners=aligned)
    found = interpolation.apply(x, x.dim() - 1)
    agree(found, expected)
    assert window.outputs == m
    assert (interpolation.index >= torch.tensor(window.first)).all()
    assert (interpolation.index <= torch.tensor(window.last)).all()
    first, last = window.reads(m // 3, m)
    part = interpolation.part(m // 3, m, first)
    assert torch.equal(part.apply(x[..., first:last], x.dim() - 1), found[..., m // 3 :])


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
    line = windows._ResizedLine(mode, dims, resize, True, by_taps, dtype)
    first, last = line.window.reads(start, stop)
    part = line.part((start, stop), (first, last))
    y = x[..., first:last]
    if part.taps is None:
        aligned = () if mode.startswith("nearest") else (corners,)
        scales = (*(None,) * len(ones), part.scale)
        y = windows._KERNELS[mode][dims](y, (*ones, part.size), *aligned, *scales)[..., part.inside]
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

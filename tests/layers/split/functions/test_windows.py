"""Pools, resizing, padding, patches and samples of split images."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.layers.split.functions import windows
from tests.layers.split.against_whole import called, check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
PLANE, EVEN, FEW = (2, 3, 9, 7), (2, 3, 8, 6), (2, 2, 2, 2)


def places():
    return (torch.rand(2, 5, 7, 2, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()


def there_and_back(x):
    y, index = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y * 2, index, 2), F.max_unpool2d(y, index, 2, output_size=(2, 3, 9, 7))


def line_unpooled(x):
    return F.max_unpool1d(*F.max_pool1d(x, 3, 2, return_indices=True), 3, 2)


def moved(x, theta):
    return F.grid_sample(x, F.affine_grid(theta, x.shape, False), "bilinear", "border", False)


def sampled(x, places):
    return F.grid_sample(x, places, align_corners=True)


# Forms beyond torch's samples.
FORMS = {
    "max ceil": (called(torch.max_pool2d, 3, stride=2, ceil_mode=True), [PLANE]),
    "max dilated": (called(F.max_pool2d, (3, 2), 1, dilation=(2, 3)), [PLANE]),
    "max with indices": (called(F.max_pool2d_with_indices, 2, 2), [PLANE]),
    "max unbatched": (called(F.max_pool2d, 2), [(3, 9, 8)]),
    "average padded": (called(F.avg_pool2d, 3, 2, 1, count_include_pad=False, ceil_mode=True), [PLANE]),
    "average divisor": (called(F.avg_pool2d, (3, 2), divisor_override=5), [PLANE]),
    "average of all": (called(F.avg_pool2d, (9, 7)), [PLANE]),
    "max of NumPy's numbers": (called(F.max_pool2d, np.int64(3), np.int64(2)), [PLANE]),
    "max of a tensor's number": (called(F.max_pool2d, torch.tensor(2), padding=np.int64(1)), [PLANE]),
    "norm": (called(F.lp_pool2d, 2.0, 3, stride=2, ceil_mode=True), [PLANE]),
    "norm 1-D": (called(F.lp_pool1d, 3, 2), [(2, 3, 11)]),
    "norm infinite": (called(F.lp_pool2d, float("inf"), 2), [PLANE]),
    "adaptive average part": (called(F.adaptive_avg_pool2d, (1, None)), [PLANE]),
    "adaptive average both": (called(F.adaptive_avg_pool2d, (1, 3)), [PLANE]),
    "adaptive average 3-D": (called(F.adaptive_avg_pool3d, (2, 1, 3)), [(1, 2, 5, 6, 5)]),
    "adaptive max one": (called(F.adaptive_max_pool2d, 1, return_indices=True), [PLANE]),
    "nearest": (called(F.interpolate, scale_factor=2), [PLANE]),
    "nearest-exact": (called(F.interpolate, scale_factor=(1.7, 0.6), mode="nearest-exact"), [PLANE]),
    "recomputed": (called(F.interpolate, None, 1.6, "bilinear", recompute_scale_factor=True), [PLANE]),
    "antialias": (called(F.interpolate, size=(5, 4), mode="bilinear", antialias=True), [PLANE]),
    "to one": (called(F.interpolate, size=1, mode="bilinear"), [PLANE]),
    "a line": (called(F.interpolate, scale_factor=2, mode="linear"), [(2, 3, 7)]),
    "a volume": (called(F.interpolate, scale_factor=2, mode="trilinear"), [(1, 2, 3, 4, 5)]),
    "a value around": (called(F.pad, (1, 2, 0, 1), mode="constant", value=1.5), [(3, 3, 9, 7)]),
    "not a number around": (called(F.pad, (1, 2, 0, 1), value=float("nan")), [(3, 3, 9, 7)]),
    "around all": (called(F.pad, (1, 0, 0, 1, 2, 1, 1, 1), value=-2.0), [(3, 3, 9, 7)]),
    "cropped": (called(F.pad, (-1, -2, 1, -3)), [(3, 3, 9, 7)]),
    "circular, cropped": (called(F.pad, (-2, 3, 1, -1), mode="circular"), [(3, 3, 9, 7)]),
    "reflected, cropped": (called(F.pad, (-2, 3, 1, -1), mode="reflect"), [(3, 3, 9, 7)]),
    "a padded vector": (called(F.pad, (1, 2)), [(5,)]),
    "a padded matrix": (called(F.pad, (1, 2, 0, 3)), [(5, 3)]),
    "six dimensions": (called(F.pad, (0, 1, 2, 0, 1, 1)), [(3, 4, 5, 2, 3, 2)]),
    "whole numbers": (called(F.pad, (1, 2), value=3), [torch.arange(10).view(2, 5)]),
    "nothing is padded": (called(F.pad, (0, 0), mode="replicate"), [(5, 3)]),
    "around nothing": (called(F.pad, (1, 1, 1, 0)), [(3, 4, 0, 2)]),
    "nothing is resized": (lambda x: F.interpolate(x[:0], scale_factor=2), [(3, 4, 5, 2)]),
    "few in overlapping windows": (called(F.max_pool2d, 2, 1, 1), [FEW]),
    "few in windows": (called(F.avg_pool2d, 2), [FEW]),
    "a mean of few": (called(F.adaptive_avg_pool2d, 1), [FEW]),
    "the largest of few": (called(F.adaptive_max_pool2d, (2, 1)), [FEW]),
    "few resized": (called(F.interpolate, scale_factor=2, mode="bilinear"), [FEW]),
    "few reflected": (called(F.pad, (1, 1, 1, 0), mode="reflect"), [FEW]),
    "unpooled": (there_and_back, [EVEN]),
    "a line unpooled": (line_unpooled, [EVEN[:3]]),
    "patches": (called(F.unfold, (3, 2), padding=1, stride=(2, 1)), [EVEN]),
    "patches of one image": (called(F.unfold, (3, 2), padding=1, stride=(2, 1)), [(3, 5, 7)]),
    "patches of no truths": (called(F.unfold, 2, stride=2), [torch.ones(0, 1, 5, 5).bool()]),
    "folded": (called(F.fold, (5, 4), (2, 3)), [(2, 3 * 6, 8)]),
    "one image folded": (called(F.fold, 5, 2, stride=3, padding=1), [(8, 4)]),
    "samples": (lambda x, g: F.grid_sample(x, g, align_corners=False), [EVEN], [places]),
    "samples of a plain image": (lambda g, x: sampled(x, g), [places], [EVEN]),
    "samples of both": (sampled, [(2, 3, 8, 2), places]),
    "an affine image": (moved, [EVEN], [(2, 2, 3)]),
}
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("windows", 6)


@pytest.mark.sizes(2)
def test_torch_checks_an_argument_that_equals_one_of_another_type(P_world):
    x = cut_along(P_world, 2, numbers(*PLANE))
    F.adaptive_avg_pool2d(x, 1)
    for wrong in (1.0, True):
        with pytest.raises(TypeError):
            F.adaptive_avg_pool2d(x, wrong)


@pytest.mark.sizes(2, 3, 4)
def test_what_does_not_fit_is_refused_on_all_ranks(P_world):
    x = cut_along(P_world, 2, numbers(*PLANE))
    for wrong in (called(F.max_pool2d, 12), called(F.pad, (9, 0, 0, 0), mode="reflect")):
        with pytest.raises((RuntimeError, ShapeError)):
            wrong(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_largest_of_integers_are_torchs(P_world, dtype):
    # The smallest values are those of the padding.
    small = torch.iinfo(dtype).min
    x = (torch.arange(126).view(1, 2, 9, 7) * 7 % 100 + small).clamp(min=small + 40).sub(40).to(dtype)

    def pooled(x):
        line = F.max_pool1d(x[..., 0], 3, 2, 1, return_indices=True)
        plane = F.max_pool2d(x, 3, 2, 1), *F.max_pool2d(x, (3, 2), 1, 1, (2, 1), True, return_indices=True)
        return *line, *plane, F.max_pool3d(x[None], 2)

    check(P_world, pooled, [x], gradients=False)


def test_changes_of_a_view_of_what_was_padded(P_world):
    def changed(x):
        y = F.pad(x, (0, 1, 0, 0, 1, 0), value=0.7)
        y.flatten().neg_()
        return y

    check(P_world, changed, [numbers(5, 2, 4)], only=[(P_world.size, 1, 1)])


@pytest.mark.mpi(min_size=2)
def test_max_unpool_by_indices_in_any_order_of_memory(P_world):
    y, index = F.max_pool2d(numbers(1, 1, 8, 6), 2, return_indices=True)
    across = index.mT.contiguous().mT
    whole = y.detach().requires_grad_()
    mine = cut_along(P_world, 1, whole)
    F.max_unpool2d(whole, index, 2).square().sum().backward()
    F.max_unpool2d(mine, across, 2).square().sum().backward()
    torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)


@pytest.mark.mpi(min_size=2)
def test_padding_by_nan_is_planned_once(P_world, monkeypatch):
    x = cut_along(P_world, 2, numbers(1, 2, 8))
    made, plan = [], windows.Padding
    monkeypatch.setattr(windows, "Padding", lambda *given: made.append(given) or plan(*given))
    for _ in range(3):
        F.pad(x, (1, 2), value=float("nan"))
    assert len(made) == 1

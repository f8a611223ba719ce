"""Pools, resizing, padding, patches and samples of split images."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions

PLANE, EVEN = (2, 3, 9, 7), (2, 3, 8, 6)
POOLS = {
    "max ceil": (torch.max_pool2d, PLANE, (3,), {"stride": 2, "ceil_mode": True}),
    "max dilated": (F.max_pool2d, PLANE, ((3, 2), 1), {"dilation": (2, 3)}),
    "max with indices": (F.max_pool2d_with_indices, PLANE, (2, 2), {}),
    "max unbatched": (F.max_pool2d, (3, 9, 8), (2,), {}),
    "average padded": (F.avg_pool2d, PLANE, (3, 2, 1), {"count_include_pad": False, "ceil_mode": True}),
    "average divisor": (F.avg_pool2d, PLANE, ((3, 2),), {"divisor_override": 5}),
    "average of all": (F.avg_pool2d, PLANE, ((9, 7),), {}),
    "norm": (F.lp_pool2d, PLANE, (2.0, 3), {"stride": 2, "ceil_mode": True}),
    "norm 1-D": (F.lp_pool1d, (2, 3, 11), (3, 2), {}),
    "norm infinite": (F.lp_pool2d, PLANE, (float("inf"), 2), {}),
    "adaptive average part": (F.adaptive_avg_pool2d, PLANE, ((1, None),), {}),
    "adaptive average both": (F.adaptive_avg_pool2d, PLANE, ((1, 3),), {}),
    "adaptive average 3-D": (F.adaptive_avg_pool3d, (1, 2, 5, 6, 5), ((2, 1, 3),), {}),
    "adaptive max one": (F.adaptive_max_pool2d, PLANE, (1,), {"return_indices": True}),
}


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def resized(shape=PLANE, **options):
    return lambda: (lambda x: F.interpolate(x, **options), [numbers(shape)])


def padded(sides, shape=(3, 3, 9, 7), **options):
    return lambda: (lambda x: F.pad(x, sides, **options), [numbers(shape)])


def of_few(function, *args, **options):
    return lambda: (lambda x: function(x, *args, **options), [numbers((2, 2, 2, 2))])


def places():
    return (torch.rand(2, 5, 7, 2, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()


def there_and_back(x):
    y, index = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y * 2, index, 2), F.max_unpool2d(y, index, 2, output_size=(2, 3, 9, 7))


def moved(x, theta):
    return F.grid_sample(x, F.affine_grid(theta, x.shape, False), "bilinear", "border", False)


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "nearest": resized(scale_factor=2),
    "nearest-exact": resized(scale_factor=(1.7, 0.6), mode="nearest-exact"),
    "recomputed": resized(scale_factor=1.6, mode="bilinear", recompute_scale_factor=True),
    "antialias": resized(size=(5, 4), mode="bilinear", antialias=True),
    "to one": resized(size=1, mode="bilinear"),
    "a line": resized((2, 3, 7), scale_factor=2, mode="linear"),
    "a volume": resized((1, 2, 3, 4, 5), scale_factor=2, mode="trilinear"),
    "a value around": padded((1, 2, 0, 1), mode="constant", value=1.5),
    "around all": padded((1, 0, 0, 1, 2, 1, 1, 1), value=-2.0),
    "cropped": padded((-1, -2, 1, -3)),
    "circular, cropped": padded((-2, 3, 1, -1), mode="circular"),
    "reflected, cropped": padded((-2, 3, 1, -1), mode="reflect"),
    "a padded vector": padded((1, 2), (5,)),
    "a padded matrix": padded((1, 2, 0, 3), (5, 3)),
    "six dimensions": padded((0, 1, 2, 0, 1, 1), (3, 4, 5, 2, 3, 2)),
    "whole numbers": lambda: (lambda x: F.pad(x, (1, 2), value=3), [torch.arange(10).view(2, 5)]),
    "nothing is padded": padded((0, 0), (5, 3), mode="replicate"),
    "around nothing": padded((1, 1, 1, 0), (3, 4, 0, 2)),
    "nothing is resized": lambda: (lambda x: F.interpolate(x[:0], scale_factor=2), [numbers((3, 4, 5, 2))]),
    "few in overlapping windows": of_few(F.max_pool2d, 2, 1, 1),
    "few in windows": of_few(F.avg_pool2d, 2),
    "a mean of few": of_few(F.adaptive_avg_pool2d, 1),
    "the largest of few": of_few(F.adaptive_max_pool2d, (2, 1)),
    "few resized": of_few(F.interpolate, scale_factor=2, mode="bilinear"),
    "few reflected": of_few(F.pad, (1, 1, 1, 0), mode="reflect"),
    "unpooled": lambda: (there_and_back, [numbers(EVEN)]),
    "a line unpooled": lambda: (
        lambda x: F.max_unpool1d(*F.max_pool1d(x, 3, 2, return_indices=True), 3, 2),
        [numbers(EVEN[:3])],
    ),
    "patches": lambda: (lambda x: F.unfold(x, (3, 2), padding=1, stride=(2, 1)), [numbers(EVEN)]),
    "patches of one image": lambda: (
        lambda x: F.unfold(x, (3, 2), padding=1, stride=(2, 1)),
        [numbers((3, 5, 7))],
    ),
    "patches of no truths": lambda: (lambda x: F.unfold(x, 2, stride=2), [torch.ones(0, 1, 5, 5).bool()]),
    "folded": lambda: (lambda x: F.fold(x, (5, 4), (2, 3)), [numbers((2, 3 * 6, 8))]),
    "one image folded": lambda: (lambda x: F.fold(x, 5, 2, stride=3, padding=1), [numbers((8, 4))]),
    "samples": lambda: (lambda x, g: F.grid_sample(x, g, align_corners=False), [numbers(EVEN)], [places()]),
    "samples of a plain image": lambda: (
        lambda g, x: F.grid_sample(x, g, align_corners=True),
        [places()],
        [numbers(EVEN)],
    ),
    "samples of both": lambda: (
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        [numbers((2, 3, 8, 2)), places()],
    ),
    "an affine image": lambda: (moved, [numbers(EVEN)], [numbers((2, 2, 3))]),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(6))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "images.windows", part, 6)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("case", POOLS)
def test_pooling(P_world, case):
    function, shape, args, kwargs = POOLS[case]
    check(P_world, lambda x: function(x, *args, **kwargs), [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_what_does_not_fit_is_refused_on_all_ranks(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = block(P_x, numbers(PLANE))
    with pytest.raises((RuntimeError, ShapeError)):
        F.max_pool2d(x, 12)
    with pytest.raises((RuntimeError, ShapeError)):
        F.pad(x, (9, 0, 0, 0), mode="reflect")


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_types_under_autocast_are_torchs(P_world):
    def pooled(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sizes = F.pad(x, (1, 1, 0, 0, 0, 0), mode="replicate"), F.interpolate(x, scale_factor=2)
            pools = F.avg_pool3d(x, 2), F.max_pool3d(x, 2), F.adaptive_max_pool3d(x, 2)
            return *sizes, *pools, F.adaptive_avg_pool3d(x, 1)

    x = torch.randn(1, 2, 4, 4, 6).bfloat16()
    check(P_world, pooled, [x], gradients=False, atol=0.01)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_changes_of_a_view_of_what_was_padded(P_world):
    def changed(x):
        y = F.pad(x, (0, 1, 0, 0, 1, 0), value=0.7)
        y.flatten().neg_()
        return y

    check(P_world, changed, [numbers((5, 2, 4))], only=[(P_world.size, 1, 1)])


@pytest.mark.mpi(min_size=2)
def test_max_unpool_by_indices_in_any_order_of_memory(P_world):
    y, index = F.max_pool2d(numbers((1, 1, 8, 6)), 2, return_indices=True)
    across = index.mT.contiguous().mT
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1, 1))
    whole = y.detach().requires_grad_()
    mine = block(P_x, whole)
    F.max_unpool2d(whole, index, 2).square().sum().backward()
    F.max_unpool2d(mine, across, 2).square().sum().backward()
    torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)

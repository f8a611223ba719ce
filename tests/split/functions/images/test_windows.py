"""Pools, resizing, padding, patches and samples of split images."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions

PLANE = 2, 3, 9, 7
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
SIZES = {
    "nearest factor": {"scale_factor": 2},
    "nearest-exact": {"scale_factor": (1.7, 0.6), "mode": "nearest-exact"},
    "bilinear recomputed": {"scale_factor": 1.6, "mode": "bilinear", "recompute_scale_factor": True},
    "antialias": {"size": (5, 4), "mode": "bilinear", "antialias": True},
    "one": {"size": 1, "mode": "bilinear"},
}
PADS = {
    "value": ((1, 2, 0, 1), {"mode": "constant", "value": 1.5}),
    "all": ((1, 0, 0, 1, 2, 1, 1, 1), {"value": -2.0}),
    "crop": ((-1, -2, 1, -3), {}),
    "circular crop": ((-2, 3, 1, -1), {"mode": "circular"}),
    "reflect crop": ((-2, 3, 1, -1), {"mode": "reflect"}),
}


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


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
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("case", SIZES)
def test_resizing(P_world, case):
    check(P_world, lambda x: F.interpolate(x, **SIZES[case]), [numbers(PLANE)])


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["linear", "trilinear"])
def test_resizing_lines_and_volumes(P_world, mode):
    shape = (2, 3, 7) if mode == "linear" else (1, 2, 3, 4, 5)
    check(P_world, lambda x: F.interpolate(x, scale_factor=2, mode=mode), [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("case", PADS)
def test_padding(P_world, case):
    sides, kwargs = PADS[case]
    check(P_world, lambda x: F.pad(x, sides, **kwargs), [numbers((3, 3, 9, 7))])


@pytest.mark.mpi
def test_padding_of_other_tensors(P_world):
    check(P_world, lambda x: F.pad(x, (1, 2)), [numbers((5,))])
    check(P_world, lambda x: F.pad(x, (1, 2, 0, 3)), [numbers((5, 3))])
    check(P_world, lambda x: F.pad(x, (0, 1, 2, 0, 1, 1)), [numbers((3, 4, 5, 2, 3, 2))])
    check(P_world, lambda x: F.pad(x.long(), (1, 2), value=3), [numbers((2, 5))], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(3, 4)
def test_blocks_without_elements(P_world):
    x = numbers((2, 2, 2, 2))
    check(P_world, lambda x: F.max_pool2d(x, 2, 1, 1), [x])
    check(P_world, lambda x: F.avg_pool2d(x, 2), [x])
    check(P_world, lambda x: F.adaptive_avg_pool2d(x, 1), [x])
    check(P_world, lambda x: F.adaptive_max_pool2d(x, (2, 1)), [x])
    check(P_world, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [x])
    check(P_world, lambda x: F.pad(x, (1, 1, 1, 0), mode="reflect"), [x])


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
def test_nothing_is_padded(P_world):
    check(P_world, lambda x: F.pad(x, (0, 0), mode="replicate"), [numbers((5, 3))])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_changes_of_a_view_of_what_was_padded(P_world):
    def changed(x):
        y = F.pad(x, (0, 1, 0, 0, 1, 0), value=0.7)
        y.flatten().neg_()
        return y

    check(P_world, changed, [numbers((5, 2, 4))], only=[(P_world.size, 1, 1)])


@pytest.mark.mpi
def test_tensors_without_elements(P_world):
    x = numbers((3, 4, 0, 2))
    check(P_world, lambda x: F.interpolate(x[:0], scale_factor=2), [numbers((3, 4, 5, 2))])
    check(P_world, lambda x: F.pad(x, (1, 1, 1, 0)), [x])


EVEN = 2, 3, 8, 6


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_max_unpool(P_world):
    def there_and_back(x):
        y, index = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y * 2, index, 2), F.max_unpool2d(y, index, 2, output_size=(2, 3, 9, 7))

    check(P_world, there_and_back, [numbers(EVEN)])
    check(
        P_world,
        lambda x: F.max_unpool1d(*F.max_pool1d(x, 3, 2, return_indices=True), 3, 2),
        [numbers(EVEN[:3])],
    )


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [EVEN, (3, 5, 7)])
def test_unfold(P_world, shape):
    check(P_world, lambda x: F.unfold(x, (3, 2), padding=1, stride=(2, 1)), [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_fold(P_world):
    check(P_world, lambda x: F.fold(x, (5, 4), (2, 3)), [numbers((2, 3 * 6, 8))])
    check(P_world, lambda x: F.fold(x, 5, 2, stride=3, padding=1), [numbers((8, 4))])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_grid_sample(P_world):
    grid = (torch.rand(2, 5, 7, 2, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()
    theta = numbers((2, 2, 3))
    check(P_world, lambda x, g: F.grid_sample(x, g, align_corners=False), [numbers(EVEN)], [grid])

    def moved(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, x.shape, False), "bilinear", "border", False)

    check(P_world, moved, [numbers(EVEN)], [theta])
    check(P_world, lambda g, x: F.grid_sample(x, g, align_corners=True), [grid], [numbers(EVEN)])
    both = [numbers((2, 3, 8, 2)), grid]
    check(P_world, lambda x, g: F.grid_sample(x, g, align_corners=True), both)


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


@pytest.mark.mpi
def test_unfold_of_no_truths(P_world):
    x = torch.ones(0, 1, 5, 5, dtype=torch.bool)
    check(P_world, lambda x: F.unfold(x, (2, 2), stride=2), [x], gradients=False)

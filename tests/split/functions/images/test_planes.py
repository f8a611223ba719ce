"""Functions of split tensors that need some dimensions whole."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.split.against_whole import block, check

PLANE = 2, 3, 8, 6


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_max_unpool(P_world):
    def there_and_back(x):
        y, index = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y * 2, index, 2), F.max_unpool2d(y, index, 2, output_size=(2, 3, 9, 7))

    check(P_world, there_and_back, [numbers(PLANE)])
    check(
        P_world,
        lambda x: F.max_unpool1d(*F.max_pool1d(x, 3, 2, return_indices=True), 3, 2),
        [numbers(PLANE[:3])],
    )


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [PLANE, (3, 5, 7)])
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
    check(P_world, lambda x, g: F.grid_sample(x, g, align_corners=False), [numbers(PLANE)], [grid])

    def moved(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, x.shape, False), "bilinear", "border", False)

    check(P_world, moved, [numbers(PLANE)], [theta])
    check(P_world, lambda g, x: F.grid_sample(x, g, align_corners=True), [grid], [numbers(PLANE)])
    both = [numbers((2, 3, 8, 2)), grid]
    check(P_world, lambda x, g: F.grid_sample(x, g, align_corners=True), both)


@pytest.mark.mpi
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

"""Elements that masks choose, against torch."""

import pytest
import torch

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_by_masks(P_world):
    x, y = numbers(3, 6, 5), numbers(3, 6, 5)
    check(P_world, lambda x, y: x[y > 0] - y[y > 0], [x, y])
    check(P_world, lambda x, y: x.masked_select(y > 0).square().mean(), [x, y])
    check(P_world, lambda x, y: torch.masked_select(x, y[:, :1] > 0), [x, y])
    check(P_world, lambda x, y: ((x - y)[y > 0] ** 2).mean(), [x], [y])
    check(P_world, lambda x, y: y[x > 0].sum() * x.sum(), [x], [y])
    check(P_world, lambda x, y: x[y[:, :, 0] > 0], [x, y])
    check(P_world, lambda x, y: x[:, y[0] > 0], [x, y])
    check(P_world, lambda x, y: x[y > 100].sum() + x[y < 100].sum(), [x, y])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_of_split_masks_beside_other_indices(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    x = block(P_x, numbers(3, 6, 5).detach())
    with pytest.raises(UnsupportedError, match=r"torch\.where"):
        x[x[..., 0] > 0, torch.tensor([1])]
    with pytest.raises(IndexError, match="global shape"):
        x[x[:, :, :4] > 0]


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 1, 4), (7,), (3, 0)])
def test_places_of_elements(P_world, shape):
    some = torch.randint(0, 2, shape)
    for x in (some.bool(), some.double(), torch.zeros(shape), torch.ones(shape)):
        check(P_world, torch.nonzero, [x], gradients=False)
        check(P_world, lambda x: x.nonzero(as_tuple=True), [x], gradients=False)
        check(P_world, torch.argwhere, [x], gradients=False)
        check(P_world, lambda x: torch.argwhere(input=x.sum()), [x], gradients=False)
        check(P_world, lambda x: torch.where(x > 0), [x], gradients=False)
        check(P_world, lambda x: len(torch.argwhere(x)), [x], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
def test_elements_at_places_that_were_found(P_world):
    x, y = numbers(4, 5), numbers(4, 5)
    check(P_world, lambda x, table: table[(x > 0).nonzero()[:, 1]], [x], [numbers(5, 3)])
    check(P_world, lambda x, y: x.reshape(-1)[(y.reshape(-1) > 0).argwhere()[:, 0]], [x, y])

"""Parts of tensors by numbers, slices, masks and tensors of indices."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import shard
from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


SHAPE = 3, 6, 5
AT = torch.tensor([3, 0, 3])
MASK = torch.tensor([True, False, True, True, False, True])
INDEX = [
    lambda x: x[..., ...],
    lambda x: x[..., 0, ..., None, :2],
    lambda x: x[..., AT, ...],
    lambda x: x[1:, MASK, None, :2],
    lambda x: x[torch.tensor(False)],
    lambda x: x[0:0, None, MASK],
    lambda x: x[5:, MASK],
    lambda x: torch.narrow(x, dim=1, start=-3, length=2),
    lambda x: torch.index_select(x, dim=-1, index=AT),
    lambda x: torch.gather(x, 0, torch.arange(8).view(1, 4, 2) % 3),
    lambda x: x.scatter_add(1, torch.arange(45).view(3, 3, 5) % 2 + 1, x[:, :3]),
    lambda x: x.clone().index_add_(1, AT, x[:, :3]).scatter_(1, torch.zeros(3, 1, 5, dtype=int), 7.0),
    lambda x: x.take(torch.tensor([[5, -1], [89, 5]])),
    lambda x: [row.sin() for row in x],
]


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(3))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "places.indexing", part, 3)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("at", range(len(INDEX)))
def test_parts(P_world, at):
    check(P_world, INDEX[at], [numbers(*SHAPE)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_by_split_indices(P_world):
    at = torch.randint(0, 6, (4, 5))
    check(P_world, lambda i, table: table[i], [at], [numbers(6, 3)])
    check(P_world, lambda i, table: torch.take(table, i - 3), [at], [numbers(6, 3)])
    check(P_world, lambda i, x: torch.take(input=x, index=i), [at, numbers(4, 5)])
    check(P_world, lambda i, table: table.index_select(0, i.flatten()), [at], [numbers(6, 3)])
    check(P_world, lambda i, table: table.index_select(0, i), [torch.tensor([0])], [numbers()])
    check(P_world, F.one_hot, [at])
    check(P_world, lambda i: F.one_hot(i, num_classes=8), [at])
    check(P_world, lambda x, y: x.gather(1, (y > 0).long()), [numbers(4, 5), numbers(4, 5)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.filterwarnings("ignore:Using a non-tuple")
def test_a_list_of_slices_is_a_tuple(P_world):
    check(P_world, lambda x: x[[slice(0, 2), slice(None), slice(1, None)]], [numbers(3, 6, 5)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    x = block(P_x, numbers(3, 6, 5).detach())
    with pytest.raises(UnsupportedError, match=r"write x\[mask\] = value, or .*torch.cat"):
        x.index_put_((AT,), torch.tensor(1.0))
    with pytest.raises(IndexError):
        x[:, 6]
    with pytest.raises(IndexError, match="too many"):
        x[0, 0, 0, 0]
    for index in ((..., ..., 0), (0, ..., ..., 0), (..., ..., None), (..., ..., AT)):
        with pytest.raises(IndexError):
            torch.zeros(3, 6, 5)[index]
        with pytest.raises(IndexError, match="too many"):
            x[index]


@pytest.mark.mpi
def test_numbers_scatter_and_gather_as_torchs(P_world):
    P_x = P_world.create_cartesian_topology_partition((P_world.size,))
    x = shard(P_x, torch.arange(4.0, dtype=torch.float64)).sum()
    index = torch.tensor(0)
    assert x.gather(0, index).full_tensor() == 6
    assert x.scatter_add(0, index, torch.tensor(1.0, dtype=torch.float64)).full_tensor() == 7


@pytest.mark.mpi
def test_a_value_that_fills_has_the_gradient_of_all_ranks(P_world):
    x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    value, index = torch.tensor(2.0, dtype=torch.float64).requires_grad_(), torch.tensor([0, 2])
    for dim in (0, 1):
        check(P_world, lambda x, value, dim=dim: x.index_fill(dim, index, value), [x], [value])


@pytest.mark.mpi
@pytest.mark.parametrize("start", [torch.tensor(True), 1.5])
def test_an_interval_begins_at_a_whole_number(P_world, start):
    x = torch.randn(4, 3)
    for y in (x, block(P_world.create_cartesian_topology_partition((P_world.size, 1)), x)):
        with pytest.raises((RuntimeError, TypeError)):
            y.narrow(0, start, 2)


@pytest.mark.mpi
def test_elements_of_numbers_by_vectors_and_of_vectors_by_none(P_world):
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)
    check(P_world, lambda index, x: x.gather(0, index), [one], [numbers()])
    check(P_world, lambda x: x.gather(0, one.view(())), [numbers(5)])
    check(P_world, lambda x: x.gather(0, none), [numbers(5)])
    check(P_world, lambda x: x.sum().gather(0, torch.zeros(3, dtype=torch.int64)), [numbers(5)])
    check(P_world, lambda x: x.scatter_add(0, one.view(()), x.sum()), [numbers(5)])


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

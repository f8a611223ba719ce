"""Functions that reorder dimensions and change shapes."""

import pytest
import torch

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


SHAPE = 2, 6, 5, 4
SAME = [
    lambda x: torch.permute(x, dims=(1, 0, 2, 3)),
    lambda x: x.movedim((0, 1), (-1, 0)),
    lambda x: x.mH,
    lambda x: x.unsqueeze(2).expand(2, 6, 7, 5, 4),
    lambda x: x.repeat(2, 1, 1, 3, 2),
    lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 3, 1]), dim=2),
    lambda x: torch.rot90(x, 1, (2, 3)),
    lambda x: torch.roll(x, shifts=(-2, 3, 1), dims=(2, 3, 1)),
    lambda x: x.roll(7),
    lambda x: torch.linalg.diagonal(A=x, offset=-1, dim2=0),
]
GROUPS = [
    lambda x: x.flatten(1),
    lambda x: torch.flatten(x, 2),
    lambda x: x.flatten(2).transpose(1, 2),
    lambda x: x.view(x.size(0), -1),
    lambda x: x.reshape(-1),
    lambda x: x.ravel(),
    lambda x: x.view(2, 2, 3, 20),
    lambda x: x.view(2, 3, 2, 5, 2, 2),
    lambda x: x.reshape(12, 5, 4),
    lambda x: x.unflatten(1, (3, -1)),
    lambda x: torch.reshape(x, (4, 3, 20)),
    lambda x: x.view_as(torch.empty(6, 2, 20)),
    lambda x: x.flatten(0, 1).unflatten(0, (2, 6)),
    lambda x: x.view(2, 3, 2, 5, 4).transpose(1, 2).contiguous().view(2, 6, 5, 4),
]


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(3))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "places.shapes", part, 3)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("at", range(len(SAME)))
def test_functions(P_world, at):
    check(P_world, SAME[at], [numbers(*SHAPE)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("at", range(len(GROUPS)))
def test_groups_of_dimensions(P_world, at):
    check(P_world, GROUPS[at], [numbers(*SHAPE)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_matrices_and_vectors(P_world):
    for function in (lambda x: x.t(), lambda x: x.T, torch.atleast_3d, lambda x: x.view(-1, 3)):
        check(P_world, function, [numbers(6, 5)])
    check(P_world, lambda x: x.expand(3, 5), [numbers(1, 5)])
    check(P_world, lambda x: x.squeeze() * 2, [numbers(1, 5)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("extents", [(14, 21), (7, 14), (28, 7)])
def test_windows_of_swin_and_back(P_world, extents):
    def windows(x):
        b, h, w, c = x.shape
        x = torch.roll(x, shifts=(-3, -3), dims=(1, 2))
        x = x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)
        x = torch.tanh(x)
        x = x.view(b, h // 7, w // 7, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, shifts=(3, 3), dims=(1, 2))

    check(P_world, windows, [numbers(1, *extents, 3)])
    check(P_world, windows, [numbers(2, *extents, 3)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_extents_shorter_than_the_ranks_are_many(P_world):
    for function in (lambda x: x.flatten(1), lambda x: x.roll(1, 2), lambda x: x.flip(2), lambda x: x.triu()):
        check(P_world, function, [numbers(2, 2, 2, 2)])
    check(P_world, lambda x: x.view(0, 6), [numbers(0, 2, 3)], only=[(1, P_world.size, 1)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_a_leading_cut_stays_without_movement(P_world):
    x = block(
        P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)),
        numbers(1, 3, 7 * P_world.size, 7),
    )
    tokens = x.flatten(2).transpose(1, 2)
    assert tokens.decomposition.splits[1].lengths == (49,) * P_world.size
    assert tokens.decomposition.cut_dims == (1,)
    cut = x.permute(0, 2, 3, 1).view(1, P_world.size, 7, 1, 7, 3)
    assert cut.to_local().data_ptr() == x.to_local().data_ptr()


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_views_that_moved_are_not_changed_in_place(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = block(P_x, numbers(1, 4, 6, 2).detach())
    with pytest.raises(UnsupportedError, match="view"):
        x.flatten(1).unsqueeze(0).add_(1)
    x.flatten(2).add_(1)  # what did not move is a view
    moved = x.flatten(1)
    x.add_(1)
    with pytest.raises(UnsupportedError, match="changed"):
        moved + 1
    with pytest.raises(UnsupportedError, match="without the underscore"):
        x.squeeze_(0)
    with pytest.raises(UnsupportedError, match="without the underscore"):
        x.redistribute().as_strided_((2, 2), (1, 2))


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_errors_are_those_of_torch(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), numbers(1, 4, 6, 2))
    with pytest.raises(RuntimeError, match="invalid"):
        x.view(5, -1)
    with pytest.raises(IndexError):
        x.transpose(0, 4)
    times = block(P_world.create_cartesian_topology_partition((P_world.size,)), torch.tensor([1, 1, 2, 2]))
    with pytest.raises(UnsupportedError, match="how often"):
        torch.repeat_interleave(torch.ones(4, 1), times, dim=0, output_size=6)
    # Whatever elements stand in for those of other ranks.
    few = block(P_world.create_cartesian_topology_partition((1, P_world.size)), torch.ones(4, 1))
    with pytest.raises(UnsupportedError, match="how often"):
        few.repeat_interleave(times, dim=-2, output_size=6)


@pytest.mark.mpi
def test_dimensions_of_a_number(P_world):
    for function in (lambda x: x.mean().flip([0]), lambda x: x.mean().unfold(0, 1, 2)):
        check(P_world, function, [numbers(5, 2)])


@pytest.mark.mpi
def test_whether_a_reshaped_copy_may_change_is_alike_on_all_ranks(P_world):
    grid = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = block(grid, numbers(3, 4, 2, 1).detach()) * 1.0
    if P_world.size == 1:
        return
    with pytest.raises(UnsupportedError, match="view of another"):
        x.view(-1).sub_(1.0)


@pytest.mark.mpi
def test_grids_of_coordinates(P_world):
    for indexing in ("ij", "xy"):
        operands = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        check(P_world, lambda x, y, i=indexing: torch.meshgrid(x, y, 2 * x, indexing=i), operands)
        check(P_world, lambda x, y, i=indexing: torch.meshgrid([x, y], indexing=i)[1] * 2, operands)
    x = block(P_world.create_cartesian_topology_partition((P_world.size,)), operands[0])
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.meshgrid(x, torch.tensor(3), indexing="ij")


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_several_tensors_get_more_dimensions(P_world):
    check(P_world, torch.atleast_3d, [torch.randn(5, 3), torch.randn(4, 2)], gradients=False)

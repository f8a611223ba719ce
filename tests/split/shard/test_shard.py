"""A whole tensor cut into a split one."""

import pytest
import torch

from distdl_rma import ArgumentError, PartitionError, ShapeError, SplitTensor, shard

pytestmark = pytest.mark.mpi


@pytest.mark.sizes(1, 2, 3, 4)
def test_every_rank_keeps_its_block(P_world):
    whole = torch.randn(2, 3, 7, 5, requires_grad=True)
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = shard(P_x, whole)
    assert x.requires_grad
    assert torch.equal(x.to_local(), whole[x.decomposition.slices()])
    assert x.to_local().data_ptr() != whole.data_ptr()
    assert torch.equal(shard(P_x, whole.detach().numpy()).full_tensor(), whole)


def test_another_number_of_dimensions_is_refused(P_world):
    with pytest.raises(PartitionError):
        shard(P_world, torch.zeros(2, 2))


def test_what_has_no_shape_is_refused(P_world):
    grid = (P_world.size, 1)
    for grid_then_x, kind in (((grid, [[1.0, 2.0]]), "list"), ((torch.zeros(2, 2), {"H": -1}), "dict")):
        with pytest.raises(ArgumentError, match=f"takes a grid, then a tensor or an array, got '{kind}'"):
            shard(*grid_then_x)


def test_what_is_split_is_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    x = shard(P_x, torch.zeros(6, 4))
    with pytest.raises(ArgumentError, match=r"got a SplitTensor; its redistribute\(\)"):
        shard(P_x, x)
    for shape in (None, (6, 4)):
        with pytest.raises(ShapeError, match=r"a block is of type SplitTensor, .* to_local\(\)"):
            SplitTensor.from_local(x, P_x, shape)

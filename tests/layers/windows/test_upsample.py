"""Up-sampling of split tensors equals up-sampling of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError, UnsupportedError, layers
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi


def last(P_world, dims):
    """All ranks along the last dimension."""
    return P_world.create_cartesian_topology_partition((1,) * (dims + 1) + (P_world.size,))


def test_the_nearest_neighbour_is_torchs_for_every_size(P_world):
    P_x = last(P_world, 1)
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(14, dtype=dtype).view(1, 1, -1)
        for size in range(1, 40, 3):
            for mode in ("nearest", "nearest-exact"):
                y = layers.DistributedUpsample(P_x, size, mode=mode)(shard(P_x, x))
                assert torch.equal(y, shard(P_x, nn.Upsample(size, mode=mode)(x))), (mode, size)


def test_nearest_neighbours_have_their_exact_adjoint(P_world, comm):
    P_x = last(P_world, 2)
    layer = layers.DistributedUpsamplingNearest2d(P_x, scale_factor=1.7)
    x = shard(P_x, torch.randint(-9, 9, (1, 2, 7, 8)).double()).requires_grad_()
    y = layer(x)
    g = torch.randint(-9, 9, y.shape).double()
    y.backward(g)
    assert comm.allreduce(float((y.detach() * g).sum())) == comm.allreduce(float((x.detach() * x.grad).sum()))


def test_one_wrong_input_raises_on_all_ranks_and_leaves_the_layer_usable(P_world, comm):
    P_x = last(P_world, 1)
    layer = layers.DistributedUpsample(P_x, scale_factor=2, mode="linear", name="up")
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    wrong = shard(P_x, x)[0] if comm.rank == comm.size - 1 else shard(P_x, x)
    with pytest.raises(ShapeError, match=f"'up': rank {comm.size - 1} has a tensor of 2 dimensions"):
        layer(wrong)
    with pytest.raises(UnsupportedError, match=r"'up': the input is torch\.int64"):
        layer(shard(P_x, x).long())
    agree(layer(shard(P_x, x)), shard(P_x, nn.Upsample(scale_factor=2, mode="linear")(x)))

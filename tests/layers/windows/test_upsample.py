"""Up-sampling of split tensors equals up-sampling of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import layers
from tests.layers.sequential import shard

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

"""Up-sampling of split tensors equals up-sampling of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, PartitionError, ShapeError, UnsupportedError, layers
from tests.fuzz.pooling import Resized
from tests.layers.random_shards import cut_balanced
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi

MODES = {
    "nearest": 2,
    "nearest-exact": 2,
    "linear": 1,
    "bilinear": 2,
    "bicubic": 2,
    "trilinear": 3,
}
modes = pytest.mark.parametrize("mode", MODES)


def last(P_world, dims):
    """All ranks along the last dimension."""
    return P_world.create_cartesian_topology_partition((1,) * (dims + 1) + (P_world.size,))


@modes
@pytest.mark.parametrize("scale", [0.4, 1.3, 2, 3.7])
@pytest.mark.parametrize("recompute", [None, True])
def test_fractional_factors_follow_torch(P_world, mode, scale, recompute):
    dims = MODES[mode]
    P_x = last(P_world, dims)
    arguments = {"scale_factor": scale, "mode": mode, "recompute_scale_factor": recompute}
    x = torch.randn(2, 2, *range(5, 5 + dims), dtype=torch.float64, requires_grad=True)
    expected = Resized(nn.Upsample(**arguments))(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    local = shard(P_x, x).requires_grad_()
    y = layers.DistributedUpsample(P_x, **arguments)(local)
    agree(y, shard(P_x, expected))
    y.backward(shard(P_x, gradient))
    agree(local.grad, shard(P_x, x.grad), "gradient")


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shorter_types_equal_those_of_torch(P_world, mode, dtype):
    P_x = last(P_world, MODES[mode])
    x = torch.randn(1, 2, *[6] * MODES[mode]).to(dtype)
    module = nn.Upsample(size=11, mode=mode)
    local = shard(P_x, x).requires_grad_()
    y = layers.DistributedUpsample(P_x, size=11, mode=mode)(local)
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.detach(), shard(P_x, module(x)), rtol=tolerance, atol=tolerance)
    y.sum().backward()
    assert local.grad.dtype == dtype


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


@pytest.mark.mpi(min_size=2)
def test_output_may_be_split_in_another_way(P_world):
    P_x = last(P_world, 2)
    P_y = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = torch.randn(1, 2, 6, 5, dtype=torch.float64)
    y = layers.DistributedUpsamplingBilinear2d(P_x, size=(9, 7), P_y=P_y)(shard(P_x, x))
    agree(y, cut_balanced(P_y, nn.UpsamplingBilinear2d(size=(9, 7))(x)))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either size or scale_factor"),
        ({"size": 3, "scale_factor": 2}, "give either size or scale_factor"),
        ({"size": 0}, "size is an integer of at least 1"),
        ({"scale_factor": -1.0}, "scale_factor is a positive number"),
        ({"size": 3, "mode": "area"}, "mode is one of"),
        ({"size": 3, "mode": "bilinear"}, "mode 'bilinear' is for 2 spatial dimensions, P_x has 1"),
        ({"size": 3, "align_corners": False}, "align_corners has no meaning with mode 'nearest'"),
        ({"size": 3, "recompute_scale_factor": True}, "recompute_scale_factor has no meaning"),
    ],
)
def test_impossible_arguments_are_refused(P_world, arguments, message):
    with pytest.raises(ArgumentError, match=f"DistributedUpsample: {message}"):
        layers.DistributedUpsample(last(P_world, 1), **arguments)


def test_impossible_partitions_are_refused(P_world):
    with pytest.raises(PartitionError, match="tensors have 3, 4 or 5"):
        layers.DistributedUpsample(P_world, size=2)
    with pytest.raises(PartitionError, match="P_x has 3 dimensions"):
        layers.DistributedUpsamplingNearest2d(last(P_world, 1), size=2)

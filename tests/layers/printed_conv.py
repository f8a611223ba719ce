"""The set-ups that the convolution document shows, and a program for twelve ranks that checks them."""

SCRIPT = """
import torch
from mpi4py import MPI
from distdl_rma import MPIPartition
from distdl_rma.layers import DistributedConv1d
from distdl_rma.split.shard import block_of as shard

comm = MPI.COMM_WORLD
P_world = MPIPartition(comm)

def grid(ranks, shape):
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)

def check(layer, P_x, P_y, sequential):
    x = torch.randn(2, 8, 13, dtype=torch.float64, requires_grad=True)
    local = shard(P_x, x).requires_grad_()
    y, out = sequential(x), layer(local)
    y.square().sum().backward()
    out.square().sum().backward()
    if P_y.active:
        torch.testing.assert_close(out, shard(P_y, y))
    if P_x.active:
        torch.testing.assert_close(local.grad, shard(P_x, x.grad))
    for key, parameter in sequential.named_parameters():
        store = layer.placed.placements[key].store
        if store.partition.active:
            torch.testing.assert_close(getattr(layer, key).grad, parameter.grad[store.slices()])

def both(weights, *partitions):
    arguments = dict(in_channels=8, out_channels=7, kernel_size=3, padding=1, dtype=torch.float64)
    torch.manual_seed(1)
    layer = DistributedConv1d(*partitions, **arguments, weights=weights)
    torch.manual_seed(1)
    sequential = torch.nn.Conv1d(**arguments)
    for _ in range(2):
        layer.zero_grad()
        sequential.zero_grad()
        check(layer, partitions[0], partitions[1 % len(partitions)], sequential)
    return layer

"""
FEATURE = """
for weights in ("replicated", "root"):
    layer = both(weights, grid(range(4), (1, 1, 4)))
    stores = weights == "replicated" or P_world.rank == 0
    assert layer.weight.shape == ((7, 8, 3) if stores else (0,))
"""
CHANNEL = """
P_x, P_y, P_W = grid(range(4), (1, 4, 1)), grid(range(3), (1, 3, 1)), grid(range(12), (3, 4, 1))
for weights in ("replicated", "root"):
    layer = both(weights, P_x, P_y, P_W)
    i, j, _ = P_W.index
    rows = (3, 2, 2)[i]
    assert layer.weight.shape == (rows, 2, 3)
    assert layer.bias.shape == ((rows,) if j == 0 else (0,))
"""
GENERAL = """
P_x, P_y, P_W = grid(range(6), (1, 2, 3)), grid(range(6, 12), (1, 2, 3)), grid(range(12), (2, 2, 3))
for weights in ("replicated", "root"):
    layer = both(weights, P_x, P_y, P_W)
    i, j, k = P_W.index
    stores = weights == "replicated" or k == 0
    assert layer.weight.shape == (((4, 3)[i], 4, 3) if stores else (0,))
    assert layer.bias.shape == (((4, 3)[i],) if stores and j == 0 else (0,))
"""
END = """
P_world.deactivate()
"""
SET_UPS = {"feature-distributed": FEATURE, "channel-distributed": CHANNEL, "generalized": GENERAL}
PROGRAM = "".join(
    (
        SCRIPT,
        *(f"{body}if comm.rank == 0:\n    print('equal: {name}')\n" for name, body in SET_UPS.items()),
        END,
    )
)
EQUAL = [f"equal: {name}" for name in SET_UPS]

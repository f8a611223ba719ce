"""What the documents of linear layers and convolutions print, on the twelve ranks that one of them needs."""

import numpy as np
import torch
from torch import nn

from distdl_rma import MPIPartition, rehearse, zero_volume_tensor
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import partitioned
from tests.layers.partitioned.every_layer import grid
from tests.layers.partitioned.twins import Form, Twins

RANKS = 12


def conv_like_torchs(P_world, weights, *partitions):
    """Shapes that a rank keeps of a convolution, which equals torch's in output and gradients, twice."""
    form = Form("Conv1d", (8, 7, 3), {"padding": 1}, partitions, shape=(2, 8, 13))
    twins = Twins(P_world, form, weights=weights)
    for _ in range(2):
        twins.step(twins.draw())
    return tuple(twins.layer.weight.shape), tuple(twins.layer.bias.shape)


def feature_distributed(P_world, weights):
    found = conv_like_torchs(P_world, weights, grid(P_world, (1, 1, 4), range(4)))
    assert found == (((7, 8, 3), (7,)) if weights == "replicated" or P_world.rank == 0 else ((0,), (0,)))


def channel_distributed(P_world, weights):
    P_W = grid(P_world, (3, 4, 1), range(12))
    found = conv_like_torchs(
        P_world, weights, grid(P_world, (1, 4, 1), range(4)), grid(P_world, (1, 3, 1), range(3)), P_W
    )
    i, j, _ = P_W.index
    rows = (3, 2, 2)[i]
    assert found == ((rows, 2, 3), (rows if j == 0 else 0,))


def generalized(P_world, weights):
    P_x, P_y = (grid(P_world, (1, 2, 3), ranks) for ranks in (range(6), range(6, 12)))
    P_W = grid(P_world, (2, 2, 3), range(12))
    found = conv_like_torchs(P_world, weights, P_x, P_y, P_W)
    i, j, k = P_W.index
    rows, stores = (4, 3)[i], weights == "replicated" or k == 0
    assert found == ((rows, 4, 3) if stores else (0,), (rows if stores and j == 0 else 0,))


def check_set_ups(comm):
    P_world = MPIPartition(comm)
    for set_up in (feature_distributed, channel_distributed, generalized):
        for weights in ("replicated", "root"):
            set_up(P_world, weights)


def test_set_ups_of_convolutions_keep_weights_where_the_document_says():
    rehearse(RANKS, check_set_ups)


# Without the prompts that are printed before each line, and names of the numbers of features.
EXAMPLE = """
{partitions}
x_local_shape = np.array({shape})

layer = DistributedLinear{call}

x = zero_volume_tensor()
if {active}.active:
    x = torch.rand(*x_local_shape)

y = layer(x)
"""
GENERAL = """
P_x_base = P_world.create_partition_inclusive(np.arange(0, 4))
P_x = P_x_base.create_cartesian_topology_partition([1, 4])

P_y_base = P_world.create_partition_inclusive(np.arange(4, 7))
P_y = P_y_base.create_cartesian_topology_partition([1, 3])

P_W_base = P_world.create_partition_inclusive(np.arange(0, 12))
P_W = P_W_base.create_cartesian_topology_partition([3, 4])
"""
SINGLE = """
P_x_base = P_world.create_partition_inclusive(np.arange(0, 8))
P_x = P_x_base.create_cartesian_topology_partition([2, 1, 4])
"""
SEPARATE = f"{SINGLE}\nP_y = P_x_base.create_cartesian_topology_partition([2, 4, 1])\n"
# The partitions of an example are named the other way round than in their prose: that reading too.
IN_PROSE = SEPARATE.replace("P_x =", "P_z =").replace("P_y =", "P_x =").replace("P_z =", "P_y =")
# What makes the partitions, the local shape of the input, the layer, and where the input is.
EXAMPLES = {
    "general": (GENERAL, [1, 4], "(P_x, P_y, P_W, 16, 12)", "P_x"),
    "AllGather, single": (SINGLE, [2, 8, 4], "AllGather(P_x, 16, 12)", "P_x"),
    "AllGather, separate": (SEPARATE, [2, 8, 4], "AllGather(P_y, 16, 12, P_x=P_x)", "P_y"),
    "AllGather, as in the prose": (IN_PROSE, [2, 2, 16], "AllGather(P_y, 16, 12, P_x=P_x)", "P_y"),
    "ReduceScatter, single": (SINGLE, [2, 8, 4], "ReduceScatter(P_x, 16, 12)", "P_x"),
    "ReduceScatter, separate": (SEPARATE, [2, 8, 4], "ReduceScatter(P_x, 16, 12, P_y=P_y)", "P_x"),
}


def whole(comm, P, local, shape):
    tensor = torch.empty(shape)
    for rank, part in enumerate(comm.allgather(local.detach().numpy())):
        if rank in P:
            tensor[Decomposition.balanced(P, shape).slices(rank)] = torch.from_numpy(part)
    return tensor


def linear_like_torchs(comm, P_world, partitions, shape, call, active):
    names = {**vars(partitioned), "np": np, "torch": torch, "zero_volume_tensor": zero_volume_tensor}
    names["P_world"] = P_world
    torch.manual_seed(7)
    exec(EXAMPLE.format(partitions=partitions, shape=shape, call=call, active=active), names)
    torch.manual_seed(7)
    sequential = nn.Linear(16, 12)
    layer = names["layer"]
    leading = (1,) if layer.P_x.dim == 2 else (4, 8)
    # As printed every rank draws the same numbers, so once more with others.
    other = (1 + comm.rank) * names["x"]
    for x, y in ((names["x"], names["y"]), (other, layer(other))):
        expected = sequential(whole(comm, layer.P_x, x, (*leading, 16)))
        torch.testing.assert_close(whole(comm, layer.P_y, y, (*leading, 12)), expected, rtol=1e-5, atol=1e-5)
        assert layer.P_y.active or y.numel() == 0


def check_examples(comm):
    P_world = MPIPartition(comm)
    for name, example in EXAMPLES.items():
        try:
            linear_like_torchs(comm, P_world, *example)
        except BaseException as error:
            error.add_note(name)
            raise


def test_printed_examples_of_linear_layers_equal_the_sequential_layer():
    rehearse(RANKS, check_examples)

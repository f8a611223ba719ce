"""The examples of the linear document, as printed, and a program for twelve ranks that checks them."""

SINGLE = """
>>> P_x_base = P_world.create_partition_inclusive(np.arange(0, 8))
>>> P_x = P_x_base.create_cartesian_topology_partition([2, 1, 4])
>>>
>>> in_features = 16
>>> out_features = 12
>>>
>>> x_local_shape = np.array([2, 8, 4])
>>>
>>> layer = {layer}(P_x, in_features, out_features)
>>>
>>> x = zero_volume_tensor()
>>> if P_x.active:
>>>     x = torch.rand(*x_local_shape)
>>>
>>> y = layer(x)
"""
SEPARATE = """
>>> P_x_base = P_world.create_partition_inclusive(np.arange(0, 8))
>>> P_x = P_x_base.create_cartesian_topology_partition([2, 1, 4])
>>>
>>> P_y = P_x_base.create_cartesian_topology_partition([2, 4, 1])
>>>
>>> in_features = 16
>>> out_features = 12
>>>
>>> x_local_shape = np.array([2, 8, 4])
>>>
>>> layer = {call}
>>>
>>> x = zero_volume_tensor()
>>> if {active}.active:
>>>     x = torch.rand(*x_local_shape)
>>>
>>> y = layer(x)
"""
GENERAL = """
>>> P_x_base = P_world.create_partition_inclusive(np.arange(0, 4))
>>> P_x = P_x_base.create_cartesian_topology_partition([1, 4])
>>>
>>> P_y_base = P_world.create_partition_inclusive(np.arange(4, 7))
>>> P_y = P_y_base.create_cartesian_topology_partition([1, 3])
>>>
>>> P_W_base = P_world.create_partition_inclusive(np.arange(0, 12))
>>> P_W = P_W_base.create_cartesian_topology_partition([3, 4])
>>>
>>> in_features = 16
>>> out_features = 12
>>>
>>> x_local_shape = np.array([1, 4])
>>>
>>> layer = DistributedLinear(P_x, P_y, P_W, in_features, out_features)
>>>
>>> x = zero_volume_tensor()
>>> if P_x.active:
>>>     x = torch.rand(*x_local_shape)
>>>
>>> y = layer(x)
"""
GATHERED = "(P_y, in_features, out_features, P_x=P_x)"
SCATTERED = "(P_x, in_features, out_features, P_y=P_y)"
EXAMPLES = {
    "all-gather, single": SINGLE.format(layer="DistributedLinearAllGather"),
    "all-gather, separate": SEPARATE.format(call=f"DistributedLinearAllGather{GATHERED}", active="P_y"),
    "all-gather, sharded": SEPARATE.format(call=f"DistributedLinearAllGatherZero{GATHERED}", active="P_y"),
    "reduce-scatter, single": SINGLE.format(layer="DistributedLinearReduceScatter"),
    "reduce-scatter, separate": SEPARATE.format(
        call=f"DistributedLinearReduceScatter{SCATTERED}", active="P_x"
    ),
    "reduce-scatter, sharded": SEPARATE.format(
        call=f"DistributedLinearReduceScatterZero{SCATTERED}", active="P_x"
    ),
    "general": GENERAL,
}
# The partitions of two examples are named the other way round than in their prose: that reading too.
EXAMPLES |= {
    f"{key}, as in the prose": (
        EXAMPLES[key]
        .replace("[2, 1, 4]", "GRID")
        .replace("[2, 4, 1]", "[2, 1, 4]")
        .replace("GRID", "[2, 4, 1]")
        .replace("np.array([2, 8, 4])", "np.array([2, 2, 16])")
    )
    for key in ("all-gather, separate", "all-gather, sharded")
}
CHECK = """
import numpy as np
import torch
from mpi4py import MPI
from distdl_rma import MPIPartition, zero_volume_tensor
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import *

def whole(P, local, shape):
    tensor = torch.empty(shape)
    for rank, part in enumerate(comm.allgather(local.detach().numpy())):
        if rank in P:
            tensor[Decomposition.balanced(P, shape).slices(rank)] = torch.from_numpy(part)
    return tensor

comm = MPI.COMM_WORLD
for name, example in EXAMPLES.items():
    names = dict(globals(), P_world=MPIPartition(comm))
    torch.manual_seed(7)
    exec("\\n".join(line[4:] for line in example.strip().splitlines()), names)
    torch.manual_seed(7)
    sequential = torch.nn.Linear(16, 12)
    layer, x, y = (names[key] for key in ("layer", "x", "y"))
    P_x, P_y = layer.P_x, layer.P_y
    leading = (1,) if P_x.dim == 2 else (4, 8)
    # As printed every rank draws the same numbers, so once more with others.
    for x, y in ((x, y), ((1 + comm.rank) * x, layer((1 + comm.rank) * x))):
        expected = sequential(whole(P_x, x, (*leading, 16)))
        torch.testing.assert_close(whole(P_y, y, (*leading, 12)), expected, rtol=1e-5, atol=1e-5)
        assert P_y.active or y.numel() == 0, name
    if comm.rank == 0:
        print("equal:", name)
"""
PROGRAM = f"EXAMPLES = {EXAMPLES!r}\n{CHECK}"
EQUAL = [f"equal: {name}" for name in EXAMPLES]

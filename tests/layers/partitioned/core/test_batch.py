"""An output partition balances the batch; random layers show that it else stays cut as it comes."""

import pytest
import torch

from distdl_rma import layers

pytestmark = pytest.mark.mpi


def test_an_output_partition_balances_the_batch(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    order = P_world.create_partition_inclusive(reversed(range(comm.size)))
    P_y = order.create_cartesian_topology_partition((comm.size, 1, 1))
    x = torch.randn([2 * comm.size, 0, 0, 0][comm.rank], 2, 6)
    for layer in (
        layers.DistributedMaxPool1d(P_x, 2, P_y=P_y),
        layers.DistributedConv1d(P_x, P_y, 2, 3, 3),
        layers.DistributedConvTranspose1d(P_x, P_y, 2, 3, 3),
        layers.DistributedZeroPad1d(P_x, 1, P_y=P_y),
    ):
        assert len(layer(x)) == (2 if comm.size > 1 else len(x))

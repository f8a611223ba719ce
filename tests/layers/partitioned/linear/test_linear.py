"""Distributed linear layers against the sequential one."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.layers import (
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)

pytestmark = pytest.mark.mpi
AG, RS = DistributedLinearAllGather, DistributedLinearReduceScatter
ZERO = [DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [AG, RS, *ZERO])
def test_features_and_types_are_those_of_the_weights(P_world, comm, kind):
    layer = kind(P_world.create_cartesian_topology_partition((comm.size, 1)), 6, 5)
    with pytest.raises(ShapeError, match=r"global input \(\d, 7\) has 7 features, the layer takes 6"):
        layer(torch.zeros(1, 7))
    with pytest.raises(ShapeError, match=r"input is torch.float64, the weights of rank 0 are torch.float32"):
        layer(torch.zeros(1, 6, dtype=torch.float64))

"""Halo exchange: own shard, the neighbours' elements around it, and padding beyond the domain."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.layers import HaloExchange
from tests.layers.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def test_image_too_small_for_its_padding_is_refused_on_all_ranks(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = HaloExchange(P, 4, "reflect", name="halo")
    with pytest.raises(ShapeError, match="'halo': padding mode 'reflect' needs padding smaller than"):
        layer(shard(P, torch.ones(1, 1, 4)))
    assert layer(shard(P, torch.ones(1, 1, 5))).min() == 1

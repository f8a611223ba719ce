"""What tests of split tensors share: the ranks in a row along the third of four dimensions, and tensors."""

import pytest
import torch


@pytest.fixture
def P_x(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


@pytest.fixture
def whole():
    return torch.randn(2, 3, 7, 4, dtype=torch.float64)


@pytest.fixture
def rows(P_x):
    from distdl_rma import shard

    return shard(P_x, torch.randn(2, 3, 5, 4))

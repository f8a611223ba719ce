"""One layer of each kind of pooling."""

import pytest
import torch
from torch import nn

from distdl_rma import layers

POOLS = {
    "AvgPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "MaxPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "AdaptiveAvgPool2d": {"output_size": (3, 2)},
    "AdaptiveMaxPool2d": {"output_size": (3, 2)},
}
kinds = pytest.mark.parametrize("kind", POOLS)


def rows(P_world):
    """All ranks, one after the other along the height."""
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


def layer_of(kind, P_x, **more):
    return getattr(layers, f"Distributed{kind}")(P_x, **POOLS[kind], **more)


def sequential(kind):
    return getattr(nn, kind)(**POOLS[kind])


def image(dtype=torch.float64, shape=(2, 3, 11, 7)):
    return torch.randn(shape, dtype=torch.float64).to(dtype)

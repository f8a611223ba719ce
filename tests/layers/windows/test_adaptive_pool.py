"""Pooling of split tensors to a given size."""

import pytest

from distdl_rma import (
    layers,
)
from tests.layers.sequential import shard
from tests.layers.windows.kinds_of_pooling import image, rows

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_global_average_moves_one_vector_per_rank(P_world, comm):
    P_x = rows(P_world)
    layer = layers.DistributedAdaptiveAvgPool2d(P_x, 1)
    layer(shard(P_x, image(shape=(2, 3, 40, 40))))
    operation = layer.agreement.last
    assert operation.gather is None
    exchange = operation.scatter.forward.exchange
    assert sum(piece.box.volume for piece in exchange.sends) == (2 * 3 if comm.rank else 0)

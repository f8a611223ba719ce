"""Embedding of split indices equals embedding of the whole."""

import pytest
import torch

from distdl_rma import ShapeError, layers
from tests.fuzz.embedding import check
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def test_what_are_no_indices_is_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((P_world.size,))
    with pytest.raises(ShapeError, match=r"indices are torch\.float32"):
        layers.DistributedEmbedding(P_x, 4, 3)(torch.zeros(2))

"""Embedding of split indices equals embedding of the whole."""

import pytest

from tests.fuzz.embedding import check
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)

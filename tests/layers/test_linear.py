"""Distributed linear layers against the sequential one."""

import pytest

from tests.fuzz.linear import check

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("chunk", range(8))
def test_any_linear_layer_equals_the_sequential_one(P_world, comm, chunk):
    for seed in range(20 * chunk, 20 * chunk + 20):
        check(P_world, comm, seed)

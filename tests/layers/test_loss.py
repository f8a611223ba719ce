"""Losses with a global mean."""

import pytest

from tests.fuzz.loss import check

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("first", range(0, 96, 12))
def test_random_losses_equal_the_sequential_ones(P_world, comm, first):
    for seed in range(first, first + 12):
        check(P_world, comm, seed)

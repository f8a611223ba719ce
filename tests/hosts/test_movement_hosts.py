"""Moving layers over two hosts, where broadcasts and sums go by way of one rank of each."""

import os

import pytest

from tests.fuzz.movement import check
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]


@pytest.mark.parametrize("chunk", range(4))
def test_random_arguments_give_what_the_operation_on_global_tensors_gives(P_world, comm, chunk):
    for seed in range(10 * chunk, 10 * (chunk + 1)):
        check(P_world, comm, seed)

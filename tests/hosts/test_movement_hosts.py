"""Moving layers over two hosts, where broadcasts and sums go by way of one rank of each."""

import os

import pytest

from tests.fuzz.movement import check
from tests.matrix import check_each
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_arguments_give_what_the_operation_on_global_tensors_gives(P_world, comm, first):
    check_each(check, P_world, comm, range(first, first + 10))

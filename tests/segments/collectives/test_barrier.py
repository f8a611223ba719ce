"""Barriers: everyone waits for everyone, and all learn the largest number that one brought."""

import random

import pytest

from distdl_rma import ExchangeTimeout
from distdl_rma.segments.collectives.barrier import Barrier

pytestmark = pytest.mark.mpi


def test_all_learn_the_largest_number(segments, comm):
    barrier, draw = Barrier(segments, segments.ranks[::-1], "largest"), random.Random(3)
    for _ in range(100):
        numbers = [draw.randrange(1 << 32) for _ in segments.ranks]
        assert barrier.wait(value=numbers[comm.rank]) == max(numbers)
    barrier.close()


@pytest.mark.mpi(min_size=2)
def test_the_number_of_a_call_that_timed_out_counts(segments, comm):
    barrier = Barrier(segments, segments.ranks, "repeated")
    barrier.connect()
    comm.Barrier()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout, match=r"to reach 'repeated' \(epoch 1\)"):
            barrier.wait(timeout=0.02, value=7)
    comm.Barrier()
    assert barrier.wait(value=5 if comm.rank else 9) == 7
    barrier.close()

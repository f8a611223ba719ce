"""All-to-alls: a transposition of blocks."""

import random

import numpy as np
import pytest

from distdl_rma.segments import Alltoall

pytestmark = pytest.mark.mpi


def test_all_to_all_is_its_own_inverse_with_the_counts_transposed(segments, comm):
    draw = random.Random(1)
    counts = [[draw.choice((0, 1, 5)) for _ in segments.ranks] for _ in segments.ranks]
    there = Alltoall(segments, segments.ranks, counts, np.int64, "there")
    back = Alltoall(segments, segments.ranks, list(zip(*counts, strict=True)), np.int64, "back")
    assert there.sends == back.receives and there.receives == back.sends
    for step in range(5):
        operand = 1000 * comm.rank + 100 * step + np.arange(sum(there.sends))
        there.active[:] = operand
        there.start()
        back.active[:] = there.wait()
        back.start()
        assert np.array_equal(back.wait(), operand)
    there.close()
    back.close()

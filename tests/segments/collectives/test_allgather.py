"""All-gathers of vectors of different lengths, and of words."""

import numpy as np
import pytest

from distdl_rma import Machine
from distdl_rma.segments import Allgather
from distdl_rma.segments.collectives.allgather import gather_words

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [np.int16, np.dtype("2u1,f8")])
def test_result_is_the_operands_one_behind_the_other_in_the_order_of_the_ranks(segments, comm, dtype):
    ranks = segments.ranks[::-1]
    lengths = [(3 * rank) % 5 for rank in ranks]
    job = Allgather(segments, ranks, lengths, dtype, "lengths")
    numbers = {rank: np.arange(7 * rank, 7 * rank + n) for rank, n in zip(ranks, lengths, strict=True)}
    operands = [numbers[rank].astype(np.int16).astype(dtype) for rank in ranks]
    for _ in range(4):
        job.active[...] = operands[ranks.index(comm.rank)]
        job.start()
        assert np.array_equal(job.wait(), np.concatenate(operands))
    job.close()


def test_nothing_to_gather_is_legal(segments):
    job = Allgather(segments, segments.ranks, 0, np.float64, "nothing")
    job.start()
    assert job.wait().size == 0
    job.close()


def test_all_hear_what_every_rank_says(comm):
    ranks = list(reversed(range(comm.size)))
    with Machine(comm, ranks=ranks, segment_size="1MiB") as machine:
        said = gather_words(machine.segments, {"x": "y" * (comm.rank % 2) * 1000}, "words")
        assert list(said.items()) == [(rank, {"x": "y" * (rank % 2) * 1000}) for rank in ranks]
        for again in range(3):
            same = gather_words(machine.segments, ["same", None], f"again {again}")
            assert list(same.items()) == [(rank, ["same", None]) for rank in ranks]

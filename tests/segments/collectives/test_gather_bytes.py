"""Words of all ranks for all ranks."""

import pytest

from distdl_rma import Machine
from distdl_rma.segments.collectives.gather_bytes import gather_bytes

pytestmark = pytest.mark.mpi


def test_all_hear_what_every_rank_says(comm):
    ranks = list(reversed(range(comm.size)))
    with Machine(comm, ranks=ranks, segment_size="1MiB") as machine:
        words = b"x" * (comm.rank % 2) * 1000
        said = gather_bytes(machine.segments, words, "words")
        assert said.get(b"") == (tuple(r for r in ranks if r % 2 == 0) or None)
        assert said.get(b"x" * 1000) == (tuple(r for r in ranks if r % 2) or None)
        for again in range(3):
            assert gather_bytes(machine.segments, b"same", f"again {again}") == {b"same": machine.ranks}

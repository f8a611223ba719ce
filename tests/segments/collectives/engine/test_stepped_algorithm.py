"""Steps that are generators: notifications on a node, and what becomes of a step in the middle."""

import numpy as np
import pytest

from distdl_rma.errors import ExchangeTimeout
from distdl_rma.segments.collectives.engine.collective import Collective
from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite
from distdl_rma.segments.collectives.engine.stepped_algorithm import SteppedAlgorithm

pytestmark = pytest.mark.mpi


class Chain(SteppedAlgorithm):
    """Each rank of a node adds one to what the rank before it has."""

    def __init__(self, site):
        super().__init__(site, 1, np.dtype(np.int64), (), "collective=Chain")

    def script(self, parity):
        here = self.layout.here
        at = here.index(self.layout.me)
        if at:
            yield from self.wait_for(0, here[at - 1 : at])
            self.load(self.vectors[parity], self.rows[parity][at - 1])
        self.vectors[parity][0] += 1
        self.notify(0, here[at + 1 : at + 2])
        # Nobody goes on before all have read.
        self.notify(1, self.layout.others_here)
        yield from self.wait_for(1, self.layout.others_here)


@pytest.fixture
def chain(segments):
    job = Collective(Chain(CollectiveSite.checked(segments, segments.ranks, "chain")))
    yield job
    job.close()


def test_what_a_rank_stored_before_it_notifies_is_there_for_the_notified(segments, chain):
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    for step in range(100):
        chain.active[:] = step if segments.rank == node[0] else -1
        chain.start()
        assert chain.wait().tolist() == [step + 1 + node.index(segments.rank)]


def test_a_step_that_waits_says_for_whom(segments, comm, chain):
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    chain.connect()
    comm.Barrier()
    chain.active[:] = 0
    if segments.rank == node[0]:
        comm.Barrier()
    chain.start()
    if segments.rank != node[0]:
        with pytest.raises(ExchangeTimeout, match=r"for rank \d in 'chain' \(step 1, on this node\)"):
            chain.wait(timeout=0.02)
        comm.Barrier()
    chain.wait()

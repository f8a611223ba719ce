"""Steps that are generators: notifications on a node, communicators between nodes, shares of a reduction."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout
from distdl_rma.segments.collectives.between_nodes import Messages
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.reduction import Reduction, element_of
from distdl_rma.segments.collectives.stepped_algorithm import Scripted, ShareReduction, SteppedAlgorithm


def scripted(script):
    step = Scripted(SimpleNamespace(segment=SimpleNamespace(lock=threading.RLock())))
    step._running = script
    return step


def test_a_step_is_over_when_its_script_is():
    step = scripted(iter([None, None]))
    assert [step.advance() for _ in range(4)] == [False, False, True, True]
    assert not step.broken


def test_an_interrupted_step_counts_as_over_and_says_what_it_was():
    def script():
        yield
        raise KeyError("half done")

    step = scripted(script())
    assert not step.advance()
    with pytest.raises(KeyError):
        step.advance()
    assert step.advance()
    assert step.broken == "KeyError('half done')"


COUNT = 11


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


@pytest.mark.mpi
def test_what_a_rank_stored_before_it_notifies_is_there_for_the_notified(segments, chain):
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    for step in range(100):
        chain.active[:] = step if segments.rank == node[0] else -1
        chain.start()
        assert chain.wait().tolist() == [step + 1 + node.index(segments.rank)]


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_ranks_have_a_communicator_in_their_order_and_the_next_user_has_the_same(segments, comm):
    ranks = segments.ranks[::-1]
    if len(ranks) == 1:
        alone = Messages(segments, ranks, "alone")
        alone.connect()
        assert alone.comm == MPI.COMM_SELF
        alone.close()
        return
    made = []
    for name in ("first", "second"):
        between = Messages(segments, ranks, name)
        between.connect()
        between.connect()
        assert between.comm.allgather(comm.rank) == list(ranks)
        made.append(between.comm)
        between.close()
        between.close()
    assert made[0] == made[1]


@pytest.mark.mpi
@pytest.mark.mpi(min_size=2)
def test_uses_that_overlap_without_end_take_turns_with_few_communicators(segments, comm):
    under_way = [Messages(segments, segments.ranks, "use 0")]
    under_way[0].connect()
    before = len(segments.communicators._made[segments.ranks])
    for use in range(1, 12):
        under_way.append(Messages(segments, segments.ranks, f"use {use}"))
        under_way[-1].connect()
        assert under_way[0].comm != under_way[1].comm
        # Not all ranks have given the older one back when the next one begins.
        if comm.rank == use % comm.size:
            comm.Barrier()
        under_way.pop(0).close()
        if comm.rank != use % comm.size:
            comm.Barrier()
    assert len(segments.communicators._made[segments.ranks]) <= before + 3
    under_way.pop().close()
    comm.Barrier()


@pytest.mark.mpi
@pytest.mark.mpi(min_size=2)
def test_ranks_that_gave_up_waiting_and_connect_in_another_order_agree(segments, comm):
    uses = [Messages(segments, segments.ranks, name) for name in ("gave up", "came between")]
    for use in uses:
        use._meeting().connect()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout):
            uses[0].connect(0.05)
    comm.Barrier()
    # The first rank's first use is pending while all connect the second one.
    for use in reversed(uses):
        use.connect()
    assert uses[0].comm != uses[1].comm
    assert uses[0]._number == comm.bcast(uses[0]._number) and uses[1]._number == comm.bcast(uses[1]._number)
    for use in uses:
        assert use.comm.allreduce(1) == comm.size
        use.close()
    comm.Barrier()


class NodeSum(ShareReduction):
    """The sum of each node, on its first rank."""

    def __init__(self, site):
        share = site.layout.share(COUNT)
        self._share = share
        reduction = Reduction("sum", element_of(np.int64, site.name), 1, site.name)
        super().__init__(site, COUNT, share.stop - share.start, reduction, "collective=NodeSum")

    def reduce(self, rows):
        shares = [row[self._share] for row in rows]
        self.reduction.reduce(shares, shares[0])
        yield


@pytest.mark.mpi
def test_the_holders_reduce_every_element_once_and_only_then_is_the_step_complete(segments):
    job = Collective(NodeSum(CollectiveSite.checked(segments, segments.ranks, "node sum")))
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    for step in range(30):
        job.active[:] = np.arange(COUNT) + segments.rank + step
        job.start()
        result = job.wait()
        if segments.rank == node[0]:
            assert np.array_equal(result, sum(np.arange(COUNT) + rank + step for rank in node))
    job.close()

"""Ranks raise together, and their machine can be used further; or it is lost on all of them."""

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, Machine, MismatchError, PeerFailedError
from distdl_rma.segments import Allreduce
from distdl_rma.segments.machine import raise_together
from distdl_rma.segments.waiting.error_texts import LOST, USABLE

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]


@pytest.fixture
def manager(comm):
    """The segment of a machine of this test."""
    with Machine(comm, segment_size="4MiB", timeout=60) as machine:
        yield machine.segments


def connect(manager, name):
    return Allreduce(manager, manager.ranks, 4, np.float64, name=name).connect()


@pytest.mark.mpi(min_size=2)
def test_what_differs_is_raised_by_all_and_the_machine_goes_on(manager):
    for _ in range(3):
        # As a user has it: the first rank has called something else.
        with pytest.raises((MismatchError, PeerFailedError, ExchangeTimeout)) as raised:
            connect(manager, "first" if manager.rank == manager.ranks[0] else "others")
        assert raise_together(manager, raised.value, manager.ranks) and str(raised.value).endswith(USABLE)
        total = Allreduce(manager, manager.ranks, 4, np.float64, name="sum")
        assert (total(np.full(4, 1.0 + manager.rank)) == sum(1.0 + rank for rank in manager.ranks)).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_loses_the_machine(manager, comm, monkeypatch):
    monkeypatch.setattr("distdl_rma.segments.machine.GRACE_SECONDS", 0.5)
    error = MismatchError("not alike")
    if comm.rank:
        assert not raise_together(manager, error, manager.ranks) and str(error).endswith(LOST)
        assert manager.notices.any_failed
    comm.Barrier()
    if not comm.rank:
        with pytest.raises(PeerFailedError, match="not alike") as raised:
            Allreduce(manager, manager.ranks, 4, np.float64, name="alone").connect()
        assert str(raised.value).endswith(LOST)

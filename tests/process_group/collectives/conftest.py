"""Rounds of the ranks that reach each other's memory."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Machine
    from distdl_rma.process_group.collectives.rounds import Rounds


@pytest.fixture
def rounds(machine: Machine, comm: MPI.Intracomm) -> Generator[Rounds]:
    """Rounds of all ranks, where these load and store each other's memory."""
    from distdl_rma.process_group.collectives.rounds import Rounds

    if len(machine.segments.segment.direct_nodes) > 1:
        pytest.skip("the ranks do not reach each other's memory")
    rounds = Rounds(machine.segments, machine.ranks, "some rounds")
    yield rounds
    comm.Barrier()
    rounds.memory.free()

"""Process groups over every transport."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Machine
    from distdl_rma.process_group.group import RmaProcessGroup


@pytest.fixture
def group(
    machine: Machine, comm: MPI.Intracomm, request: pytest.FixtureRequest
) -> Generator[RmaProcessGroup]:
    """A group of all ranks, without torch.distributed around it."""
    from distdl_rma.process_group.group import RmaProcessGroup

    group = RmaProcessGroup(machine.segments, machine.ranks, request.module.__name__, None)
    yield group
    comm.Barrier()
    group.shutdown()

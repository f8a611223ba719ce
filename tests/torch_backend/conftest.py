"""Process groups over every transport."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.segments.conftest import segments  # noqa: F401

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Machine
    from distdl_rma.torch_backend.group import RmaProcessGroup
    from distdl_rma.torch_backend.node_slots import NodeSlots


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Torch has process groups for processes only."""
    if item.path.parent == Path(__file__).parent:
        item.add_marker("processes")


@pytest.fixture
def group(
    machine: Machine, comm: MPI.Intracomm, request: pytest.FixtureRequest
) -> Generator[RmaProcessGroup]:
    """A group of all ranks, without torch.distributed around it."""
    from distdl_rma.torch_backend.group import RmaProcessGroup

    group = RmaProcessGroup(machine.segments, machine.ranks, request.module.__name__, None)
    yield group
    comm.Barrier()
    group.shutdown()


@pytest.fixture
def rounds(machine: Machine, comm: MPI.Intracomm) -> Generator[NodeSlots]:
    """Rounds of all ranks, where these load and store each other's memory."""
    from distdl_rma.torch_backend.node_slots import NodeSlots

    if len(machine.segments.segment.direct_nodes) > 1:
        pytest.skip("the ranks do not reach each other's memory")
    rounds = NodeSlots(machine.segments, machine.ranks, "some rounds")
    yield rounds
    comm.Barrier()
    rounds.memory.free()

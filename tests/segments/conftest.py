"""Segment managers of all ranks, on one node and on several that are simulated."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma.segments import SegmentManager

# Transport, and ranks per simulated node: with 4 ranks one node, 1+1+1+1, 2+2 and 3+1.
NODES = {"one node": ("auto", None), "all remote": ("remote", None), "pairs": ("auto", 2), "3+1": ("auto", 3)}


@pytest.fixture(scope="session", params=NODES.values(), ids=NODES.keys())
def segments(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Generator[SegmentManager, None, None]:
    """Segment manager of all ranks, over every kind of nodes."""
    from distdl_rma.segments import SegmentManager

    transport, node_size = request.param
    own = comm.Dup()
    manager = SegmentManager(own, None, "64MiB", 15, transport, node_size=node_size)
    yield manager
    manager.close()
    own.Free()

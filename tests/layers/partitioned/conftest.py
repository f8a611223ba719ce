"""What tests of layers share."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_rma import Machine


@pytest.fixture
def permuted(comm: MPI.Intracomm) -> Generator[Machine, None, None]:
    """A machine whose list of ranks is not 0, 1, 2, ..."""
    from distdl_rma import Machine

    ranks = [*range(1, comm.size), 0]
    with Machine(comm, ranks=ranks, segment_size="16MiB", timeout=15) as machine:
        yield machine

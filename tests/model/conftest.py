"""A model of the test's own on rows, what goes into it, and the rank that does other things."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from distdl_rma import Partition


@pytest.fixture
def model(P_world: Partition, request: pytest.FixtureRequest) -> Generator[torch.nn.Module]:
    """The ``Net`` of the test's file, distributed."""
    import torch

    from distdl_rma import distribute

    torch.manual_seed(1)
    made = distribute(request.module.Net(), {"H": -1})
    yield made
    made.distributed.close()


@pytest.fixture
def x() -> torch.Tensor:
    """Rows and columns enough for all ranks."""
    import torch

    return torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def odd(comm: MPI.Intracomm) -> bool:
    """Whether this rank does other things than the others."""
    return comm.rank == 1

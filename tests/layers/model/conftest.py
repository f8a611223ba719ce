"""A model of the test's own on rows, what goes into it, and the rank that does other things."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from distdl_rma import Partition


@pytest.fixture
def split_of(P_world: Partition) -> Generator[Callable[..., torch.nn.Module]]:
    """Distributes a copy of a model, over rows or another grid, until the test ends."""
    from distdl_rma import distribute

    made = []

    def split_of(model: torch.nn.Module, axis: str = "H", **options: Any) -> torch.nn.Module:
        made.append(distribute(copy.deepcopy(model), {axis: -1}, **options))
        return made[-1]

    yield split_of
    for model in made:
        if hasattr(model, "distributed"):
            model.distributed.close()


@pytest.fixture
def model(split_of: Callable[..., torch.nn.Module], request: pytest.FixtureRequest) -> torch.nn.Module:
    """The ``Net`` of the test's file, distributed."""
    import torch

    torch.manual_seed(1)
    return split_of(request.module.Net())


@pytest.fixture
def x() -> torch.Tensor:
    """Rows and columns enough for all ranks."""
    import torch

    return torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def odd(comm: MPI.Intracomm) -> bool:
    """Whether this rank does other things than the others."""
    return comm.rank == 1

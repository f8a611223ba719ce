"""The same program on gloo's process group and on ours: both give the same numbers."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import distdl_rma  # noqa: F401  # known to torch from here on

with warnings.catch_warnings():
    # They still use what torch itself calls deprecated.
    warnings.simplefilter("ignore")
    import torch.distributed.nn as differentiable
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = [
    "BACKEND",
    "ZeroRedundancyOptimizer",
    "compare",
    "differentiable",
    "process_group",
    "results",
    "same_on_both",
]
# The variable serves to try the tests themselves out, with gloo against gloo.
BACKEND = os.environ.get("TESTED_BACKEND", "rma")
SEED = 20


@contextlib.contextmanager
def process_group(comm: MPI.Intracomm, backend: str = BACKEND, **options: Any) -> Iterator[None]:
    """torch's default group over all ranks of the run, destroyed on the way out."""
    if backend != "rma":
        options |= {"init_method": address(comm), "rank": comm.rank, "world_size": comm.size}
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def address(comm: MPI.Intracomm) -> str:
    """Where gloo's ranks meet: a free port of this host."""
    port = 0
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    return f"tcp://127.0.0.1:{comm.bcast(port)}"


def results(comm: MPI.Intracomm, program: Callable[..., Any], *arguments: Any, backend: str = BACKEND) -> Any:
    """What a program returns on this rank, with a fresh group and a fresh seed."""
    torch.manual_seed(SEED)
    with process_group(comm, backend):
        return program(*arguments)


def same_on_both(comm: MPI.Intracomm, program: Callable[..., Any], *arguments: Any, **tolerances: Any) -> Any:
    """Run a program on both groups, compare all tensors and numbers that it returns; return ours."""
    expected = results(comm, program, *arguments, backend="gloo")
    found = results(comm, program, *arguments)
    compare(found, expected, **tolerances)
    return found


def compare(found: Any, expected: Any, **tolerances: Any) -> None:
    """Tensors, also in lists and dictionaries, are close; anything else is equal."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, **tolerances)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        compare(list(found.values()), list(expected.values()), **tolerances)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other, **tolerances)
    else:
        assert found == expected

"""The same program on gloo's process group and on ours: both give the same numbers."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import distdl_rma  # noqa: F401  # known to torch from here on
from tests.two_hosts import CABLE, RANKS_VARIABLE

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
    "options",
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
    with contextlib.ExitStack() as stack:
        if "rma" not in backend:
            options |= {"store": stack.enter_context(store(comm)), "rank": comm.rank, "world_size": comm.size}
        dist.init_process_group(backend, **options)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def store(comm: MPI.Intracomm) -> Iterator[dist.Store]:
    """Where gloo's ranks meet: a file, as a port that is free now may be taken before it is used."""
    # Else gloo looks for the address of this host's name, which takes seconds where nobody knows it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", CABLE if RANKS_VARIABLE in os.environ else "lo")
    name = f"distdl_rma-gloo-{os.getpid()}-{time.monotonic_ns()}"
    path = Path(comm.bcast(f"{tempfile.gettempdir()}/{name}"))
    if comm.rank == 0:
        # The last rank to leave removes it, unless a group is kept to the end.
        atexit.register(path.unlink, missing_ok=True)
    yield dist.FileStore(str(path), comm.size)
    comm.Barrier()


def options(kind: Callable[[], Any], op: Any = None, root: int | None = None) -> Any:
    """Options of a call of a group: its operation and its root."""
    made = kind()
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made


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
    """Tensors, also in lists and dictionaries, and numbers are close; anything else is equal."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, **tolerances)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        compare(list(found.values()), list(expected.values()), **tolerances)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other, **tolerances)
    elif isinstance(expected, float):
        # Sums of more than two ranks may be in another order.
        assert math.isclose(found, expected, rel_tol=1e-9)
    else:
        assert found == expected

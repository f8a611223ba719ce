"""How functions and comparisons end on all ranks, and a folder that all ranks have."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4py import MPI

# Torch refuses a view for how the whole lies in memory; blocks that have moved lie otherwise.
_OF_MEMORY = (
    "view size is not compatible with input tensor's size and stride",
    "must have a last dimension with stride 1",
)


def outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a function, or its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return act(), None
    except Exception as error:
        return None, error


def same_end(
    comm: MPI.Intracomm, mine: Exception | None, theirs: Exception | None, what: str, refused: Counter[str]
) -> bool:
    """Whether all ranks and torch came to their end; raises if they ended otherwise, but by a refusal."""
    told = comm.allgather(None if mine is None else (type(mine).__name__, str(mine)))
    kinds = {None if each is None else each[0] for each in told}
    if kinds == {"UnsupportedError"}:
        refused[str(mine).split(" at ")[0].split(": ")[0].split(" in module")[0]] += 1
        return False
    if len(kinds) > 1:
        raise AssertionError(f"ranks end otherwise: {told}: {what}") from mine
    if mine is not None and theirs is None:
        raise AssertionError(f"an error that torch has not: {mine!r}: {what}") from mine
    if theirs is not None and mine is None and not any(words in str(theirs) for words in _OF_MEMORY):
        raise AssertionError(f"torch alone raises {theirs!r}, split tensors nothing: {what}") from theirs
    return mine is None and theirs is None


def no_problem(comm: MPI.Intracomm, problem: str, what: str, error: Exception | None = None) -> None:
    """Raise on all ranks if there is a problem on one."""
    problems = [each for each in comm.allgather(problem) if each]
    if problems:
        raise AssertionError(f"{problems[0]} ({len(problems)} ranks): {what}") from error


@contextmanager
def folder_of_all(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder, which all ranks wait for each other to leave unless one fails."""
    folder = Path(comm.bcast(tempfile.mkdtemp(prefix="distdl_rma_fuzz_") if comm.rank == 0 else None))
    try:
        yield folder
        comm.Barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

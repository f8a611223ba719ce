"""torch's own cases for process groups, from the installed torch, on the ranks of an MPI job.

``mpiexec -n 4 python -m mpi4py -m tests.process_group.torch_cases [--from NAME] [NAME ...]`` runs all of
them, or those that are named, and says what became of each; it ends at the first failure. The cases were
written for processes that a parent starts for each of them; here the ranks stay, and every case gets a fresh
group.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from mpi4py import MPI

from tests.process_group.backends import BACKEND, process_group

# What does not apply, with the reason; cases for devices that are not there say so themselves.
NOT_OURS = {
    "test_get_backend": "asks for the name of the backend that it was written for",
    "test_Backend_enum_class": "asks for the name of the backend that it was written for",
    "test_dump_DDP_relevant_env_vars": "asks for environment variables of torchrun",
    "test_ddp_logging_data_cpu": "asks for environment variables of torchrun",
    "test_SyncBatchNorm_process_group": "uses a model of torchvision without asking for it",
    "test_batch_isend_irecv_mixed_backend_err": "makes a group for NCCL",
    "test_batch_isend_irecv_op_err": "moves tensors to GPUs",
    "test_sparse_all_reduce_sum": "sparse tensors are refused",
    "test_barrier_timeout_full_group": "asks for the words of gloo's error",
    "test_barrier_timeout_global": "asks for the words of gloo's error",
    "test_barrier_timeout_group": "asks for the words of gloo's error",
}
GLOO_ALONE = "test_monitored_barrier"


class OnProcessor(str):
    """Name of our backend that equals those for which torch has cases for tensors on the processor."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(other) in {"gloo", "mpi", str(self)}

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


@functools.cache
def module() -> Any:
    """torch's file of cases, imported so that none of those for the processor is left out."""
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add(BACKEND)
    variables = {"BACKEND": OnProcessor(BACKEND), "WORLD_SIZE": str(MPI.COMM_WORLD.size)}
    # Cases that want torchvision are not about groups, and it takes long to load.
    vision = sys.modules.get("torchvision")
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    asked = {**os.environ, "TEMP_DIR": tempfile.gettempdir(), **variables}
    with mock.patch("os.environ", asked), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test
    del sys.modules["torchvision"]
    if vision is not None:
        sys.modules["torchvision"] = vision
    return distributed_test


@functools.cache
def cases() -> type[unittest.TestCase]:
    """The cases as a class for one rank of the job."""
    torchs = module()

    class Cases(torchs.DistributedTest._DistTestBase, unittest.TestCase):  # type: ignore[misc]
        """One rank of each case."""

        rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

        def _barrier(self, *_: object, **__: object) -> None:
            MPI.COMM_WORLD.Barrier()

    base = torchs.MultiProcessTestCase.__mro__[1]
    return type("Cases", (Cases, base), {"__init__": base.__init__})


def names() -> list[str]:
    """All cases, in the order of the alphabet."""
    return unittest.TestLoader().getTestCaseNames(cases())


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """The temporary folder of the cases, which all ranks share."""
    comm = MPI.COMM_WORLD
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(tempfile.TemporaryDirectory()) if comm.rank == 0 else None
        path = Path(comm.bcast(mine))
        if comm.rank == 0:
            for name in ("barrier", "test_dir", "init_dir"):
                (path / name).mkdir()
        comm.Barrier()
        # By this name a small world is enough for all of them.
        os.environ |= {"TEMP_DIR": str(path), "WORLD_SIZE": str(comm.size), "BACKEND": "mpi"}
        try:
            yield path
        finally:
            for name in ("TEMP_DIR", "WORLD_SIZE", "BACKEND"):
                del os.environ[name]
            comm.Barrier()


def run(name: str) -> None:
    """Run a case on all ranks; raises what it raises, and ``unittest.SkipTest`` where it does not apply."""
    if name in NOT_OURS:
        raise unittest.SkipTest(NOT_OURS[name])
    if name.startswith(GLOO_ALONE):
        raise unittest.SkipTest("torch refuses monitored_barrier to all backends but gloo")
    if "_cuda" in name:
        raise unittest.SkipTest("moves tensors to GPUs")
    torchs = module()
    case = cases()(name)
    with folder(), process_group(MPI.COMM_WORLD), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.setUp()
            getattr(case, name)()
        except SystemExit as end:
            reasons = {skip.exit_code: skip.message for skip in torchs.TEST_SKIPS.values()}
            raise unittest.SkipTest(reasons.get(end.code, f"exit {end.code}")) from None
        finally:
            case.tearDown()


def main() -> None:
    parser = argparse.ArgumentParser(prog="torch_cases")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--from", dest="first", default="")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    for name in options.names or names():
        if name < options.first:
            continue
        if comm.rank == 0:
            print(f"begin {name}", flush=True)
        begin, outcome, error = time.monotonic(), "passed", None
        try:
            run(name)
        except unittest.SkipTest as reason:
            outcome = f"skipped, {reason}"
        except BaseException as problem:
            outcome, error = f"FAILED on rank {comm.rank}: {type(problem).__name__}: {problem}", problem
        if error is not None:
            # The others may wait for this rank for ever.
            print(outcome[:600].replace("\n", " | "), flush=True)
            if options.names:
                raise error
            os._exit(1)
        comm.Barrier()
        if comm.rank == 0:
            print(f"{name}: {outcome} ({time.monotonic() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main()

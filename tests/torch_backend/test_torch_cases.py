"""torch's own cases for process groups, from the installed torch.

The cases were written for processes that a parent starts for each of them; here the ranks stay, and every
case gets a fresh group. ``ALL_TORCH_CASES=1`` in the environment runs all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

from tests.torch_backend.backends import BACKEND, process_group

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes(3)]

# One of each kind; those for sub-groups go through the same calls.
CASES = """
DistributedDataParallelCPU_grad_is_view accumulate_gradients_no_sync_allreduce_with_then_hook
all_gather_coalesced_with_empty all_gather_complex all_gather_object_default_pg all_gather_object_subgroup
all_reduce_coalesced_group_max all_reduce_complex_unsupported_ops all_reduce_full_group_product
all_reduce_sum_async all_to_all_group all_to_all_single_unequal_split_complex batch_isend_irecv_gloo_tags
broadcast broadcast_object_list ddp_create_graph destroy_group gather_checks gather_object
gather_object_subgroup get_future get_rank_size_group grads_same_across_ranks_with_no_sync irecv
reduce_group_min reduce_sum_twice scatter_checks scatter_group scatter_object_list send_recv_any_source
send_recv_with_tag_torch_profiler static_graph_api_cpu
"""
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


def chosen() -> list[str]:
    """The cases named above, or all of them in the order of the alphabet."""
    if "ALL_TORCH_CASES" not in os.environ:
        return [f"test_{name}" for name in CASES.split()]
    return unittest.TestLoader().getTestCaseNames(cases())


@pytest.mark.parametrize("name", chosen())
def test_case_of_torch(name: str) -> None:
    pytest.importorskip("expecttest")
    if name in NOT_OURS:
        pytest.skip(NOT_OURS[name])
    if name.startswith(GLOO_ALONE):
        pytest.skip("torch refuses monitored_barrier to all backends but gloo")
    if "_cuda" in name:
        pytest.skip("moves tensors to GPUs")
    torchs = module()
    case = cases()(name)
    with folder(), process_group(MPI.COMM_WORLD), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.setUp()
            getattr(case, name)()
        except unittest.SkipTest as reason:
            pytest.skip(str(reason))
        except SystemExit as end:
            reasons = {skip.exit_code: skip.message for skip in torchs.TEST_SKIPS.values()}
            pytest.skip(reasons.get(end.code, f"exit {end.code}"))
        finally:
            case.tearDown()

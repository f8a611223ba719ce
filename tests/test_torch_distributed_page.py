"""The table of operations in docs/torch-distributed.md is what the class does."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from distdl_rma.torch_backend.group import RmaProcessGroup
from distdl_rma.torch_backend.tensors import reducer_of

PAGE = (Path(__file__).parents[1] / "docs" / "torch-distributed.md").read_text()
ROWS = [
    [re.findall(r"`(\w+)`", names), re.findall(r"`(\w+)`", methods), answer.strip()]
    for names, methods, answer in re.findall(r"^\|([^|\n]*)\|([^|\n]*)\|([^|\n]*)\|$", PAGE, re.MULTILINE)
]
# What torch asks a group about itself, and what ends it.
NOT_OPERATIONS = set(
    """
    CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL BackendType abort bound_device_id boxed get_group_store group_desc
    group_name name rank set_timeout shutdown size unbox use_pg_for_symm_mem_rendezvous merge_remote_group
    """.split()  # noqa: SIM905
)
PRIVATE = {"_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing"}


def is_ours(method):
    return any(method in vars(each) for each in RmaProcessGroup.__mro__ if "distdl_rma" in each.__module__)


def test_every_operation_of_torchs_class_is_in_the_table():
    known = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")} | PRIVATE
    listed = {method for _, methods, _ in ROWS for method in methods}
    assert known & set(dir(dist.ProcessGroup)) - NOT_OPERATIONS <= listed
    # Spellings of a newer or older torch are listed, too.
    assert all(is_ours(method) or hasattr(dist.ProcessGroup, method) for method in listed)


def test_ours_is_in_our_class_and_refused_is_not():
    for names, methods, answer in ROWS:
        for method in methods:
            assert is_ours(method) == answer.startswith("ours"), (names, method, answer)


def test_functions_of_the_table_exist():
    # Both spellings, of before and since 2.13.
    newer = {"all_gather_single", "reduce_scatter_single"}
    for names, methods, _ in ROWS:
        for name in names if methods else ():
            assert name in newer or hasattr(dist, name) or hasattr(dist.distributed_c10d, name), name


def test_reductions_of_the_table_are_those_that_are_taken():
    kinds = {
        "floats": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
        "integers": [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64],
        "bool": [torch.bool],
        "complex": [torch.complex64, torch.complex128],
    }
    table = re.findall(r"^\| (`(?:SUM|AVG|MIN|BAND)`[^|]*)\| ([^|;\n]*)", PAGE, re.MULTILINE)
    assert len(table) == 4
    for ops, said in table:
        for op in re.findall(r"`(\w+)`", ops):
            for kind, types in kinds.items():
                for dtype in types:
                    try:
                        reducer_of(getattr(dist.ReduceOp, op), dtype, 2)
                        taken = True
                    except (ValueError, NotImplementedError):
                        taken = False
                    assert taken == (kind in said), (op, dtype)

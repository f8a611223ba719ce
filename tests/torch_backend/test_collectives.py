"""How calls begin, and how a group ends."""

import pytest
import torch
from torch.distributed import BroadcastOptions, ReduceOp

from distdl_rma.errors import ClosedError
from distdl_rma.torch_backend import collectives
from distdl_rma.torch_backend.collectives import op_of, root_of
from distdl_rma.torch_backend.group import RmaProcessGroup
from distdl_rma.torch_backend.tensors import OPERATIONS
from tests.segments.memory.test_context import outcome_in_a_fork

OPERATIONS_OF_TORCH = [
    *(ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX),
    *(ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR),
]
pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def test_kinds_of_calls_that_are_forgotten_are_known_anew_on_all_ranks_alike(group, comm, monkeypatch):
    monkeypatch.setattr(collectives, "_KEPT", 3)
    for step in range(25):
        x = torch.ones(1 + step * step % 5, 2)
        # Of one rank the memory is known, those of the others are copied.
        group.allreduce([x if comm.rank else x.t()]).wait()
        assert (x == comm.size).all()
        assert len(group._member._calls) <= 3 and len(group._member.cuts) <= 3


def test_nothing_begins_in_a_group_that_has_ended(machine, comm):
    group = RmaProcessGroup(machine.segments, machine.ranks, "ended", None)
    group.barrier().wait()
    group._start_coalescing(torch.device("cpu"))
    group.shutdown()
    group.shutdown()
    assert group._coalescing is None
    for call in (
        group.barrier,
        lambda: group.allreduce([torch.ones(3)]),
        lambda: group.send([torch.ones(1)], 0, 0),
    ):
        with pytest.raises(ClosedError, match="process group 'ended' or its machine: already closed"):
            call()
    comm.Barrier()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_calls_of_a_forked_process_are_refused(group, comm):
    x = torch.ones(3)
    for _ in range(3):
        group.allreduce([x]).wait()
    calls = group.barrier, lambda: group.allreduce([x]), lambda: group.send([x], 0, 0)
    for call in calls:
        assert "ProtocolError: process group" in (said := outcome_in_a_fork(call)) and "fork" in said
    comm.Barrier()
    group.barrier().wait()


def test_options_are_those_of_torch_or_none():
    options = BroadcastOptions()
    options.rootRank = 2
    assert (root_of(options, 3, "me"), root_of(None, 3, "me")) == (2, 0)
    assert op_of(None) == ReduceOp.SUM
    for op in OPERATIONS_OF_TORCH:
        assert op_of(ReduceOp(op)) == op == op_of(op)
        assert hash(op_of(ReduceOp(op))) == hash(op) in OPERATIONS
    assert len(OPERATIONS) == len(OPERATIONS_OF_TORCH)

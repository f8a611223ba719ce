"""Subtensors copied to groups of ranks, and summed over them."""

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.moves.sums import all_sum_reduce, broadcast, sum_reduce

pytestmark = pytest.mark.mpi

NEEDS = GradientNeeds(True, False)


def mine(machine, root, x):
    """What the root has, and elsewhere a tensor without elements."""
    return x if machine.rank == root else x.new_empty(0)


def test_a_sum_and_a_broadcast_are_each_others_transpose(P_world, comm):
    machine, ranks = Machine.of(P_world), P_world.ranks
    shapes, root = dict.fromkeys(ranks, (2, 3)), ranks[-1]
    total = sum_reduce(CallSite(machine, "sum"), (ranks,), (root,), shapes, torch.float64)
    copy = broadcast(CallSite(machine, "copy"), (root,), (ranks,), {root: (2, 3)}, torch.float64)
    terms = [torch.randint(-9, 9, (2, 3), generator=torch.Generator().manual_seed(r)).double() for r in ranks]
    x = terms[comm.rank].clone().requires_grad_()
    y = total(NEEDS, x)
    expected = sum(terms)
    assert torch.equal(y, mine(machine, root, expected).reshape(y.shape))
    y.backward(mine(machine, root, expected).reshape(y.shape))
    assert torch.equal(x.grad, expected)
    assert torch.equal(copy(NEEDS, mine(machine, root, expected)), expected)


def test_a_sum_on_all_ranks_is_its_own_transpose(P_world, comm):
    machine, ranks = Machine.of(P_world), P_world.ranks
    shapes = dict.fromkeys(ranks, (4,))
    operation = all_sum_reduce(CallSite(machine, "all"), (ranks,), shapes, torch.bfloat16)
    x = torch.full((4,), float(comm.rank + 1), dtype=torch.bfloat16, requires_grad=True)
    y = operation(NEEDS, x)
    assert torch.equal(y, torch.full_like(x, sum(range(comm.size + 1))))
    y.backward(x.detach())
    assert torch.equal(x.grad, y.detach())


def test_subtensors_that_are_summed_are_equal_in_shape(P_world, comm):
    shapes = {rank: (2, 3) if at else (3, 2) for at, rank in enumerate(P_world.ranks)}
    if comm.size > 1:
        with pytest.raises(ShapeError, match=r"rank 0 passes \(3, 2\) but rank 1 \(2, 3\)"):
            all_sum_reduce(CallSite(Machine.of(P_world), "it"), (P_world.ranks,), shapes, torch.float32)

"""Losses over classes of tensors that are known to be parts of one."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.loss.class_loss import ClassLoss, class_dim, gather_classes
from distdl_rma.ops.loss.global_loss import LossArguments
from distdl_rma.ops.loss.loss_sums import LossSums
from tests.layers.sequential import agree, shard

GIVEN = LossArguments("mean", {"ignore_index": 3}, {"weight": None})


def refuse(problem, alike):
    return ShapeError(f"{problem or 'none'}, {alike}")


def test_classes_are_the_second_dimension_or_the_only_one():
    assert class_dim(Partition((0,), (1, 1, 1), 0)) == 1
    assert class_dim(Partition((0,), (1,), 0)) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_is_over_the_targets_that_are_not_ignored(P_world, comm, weighted):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    x, target = torch.randn(7, 4, dtype=torch.float64).log_softmax(1), torch.randint(0, 4, (7,))
    target[0] = 0
    sums = LossSums(CallSite(Machine.of(P_x), "label"), P_x, "", False)
    rows = Decomposition.balanced(P_x, x.shape).slices()[0]
    value = ClassLoss(P_x, F.nll_loss, sums, refuse)(
        x[rows], target[rows], GIVEN._replace(weights={"weight": weight})
    )
    agree(value, F.nll_loss(x, target, weight, ignore_index=3))


@pytest.mark.mpi
def test_split_classes_need_no_message_where_the_decomposition_is_known(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    site = CallSite(Machine.of(P_x), "label")
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    gather = gather_classes(site, Decomposition.balanced(P_x, x.shape), 1, x.dtype)
    gathers = (lambda scores, _: gather(scores, needs_grad=True)), (lambda indices, _: indices)
    loss = ClassLoss(P_x, F.cross_entropy, LossSums(site, P_x, "", False), refuse, gathers)
    whole, local = x.clone().requires_grad_(), shard(P_x, x).requires_grad_()
    expected = F.cross_entropy(whole, target, ignore_index=3)
    expected.backward()
    value = loss(local, target, GIVEN)
    value.backward()
    agree(value, expected, "value")
    agree(local.grad, shard(P_x, whole.grad), "gradient")


@pytest.mark.mpi
def test_first_ranks_get_whole_classes_and_gradients_go_back(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    x = torch.randint(-9, 9, (2, 5, 3)).double()
    source = Decomposition.balanced(P_x, x.shape)
    gather = gather_classes(CallSite(Machine.of(P_x), "scores"), source, 1, x.dtype)
    local = shard(P_x, x).requires_grad_()
    y = gather(local, needs_grad=True)
    assert torch.equal(y, x) if comm.rank == 0 else y.numel() == 0
    y.backward(x if comm.rank == 0 else torch.zeros_like(y))
    assert torch.equal(local.grad, shard(P_x, x))

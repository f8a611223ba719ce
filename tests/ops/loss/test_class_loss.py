"""Losses over classes of tensors that are known to be parts of one."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError, UnsupportedError
from distdl_rma.geometry import Box, Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.loss.class_loss import ClassLoss, class_dim, index_blocks, whole_classes
from distdl_rma.ops.loss.global_loss import LossOptions, LossSums
from tests.layers.sequential import agree, shard

EVERYTHING = GradientNeeds(True, False, (True,))
F64, I64 = torch.float64, torch.int64


def refuse(problem, alike):
    return ShapeError(f"{problem or 'none'}, {alike}")


def loss_of(source, function, dtypes=None, reduction="mean", ignore_index=3):
    known = isinstance(source, Decomposition)
    P_x = source.partition if known else source
    site, options = (
        CallSite(Machine.of(P_x), "label"),
        LossOptions(function, reduction, {"ignore_index": ignore_index}),
    )
    return ClassLoss(site, source, options, LossSums(site, P_x, "", refuse), dtypes)


def test_classes_are_the_second_dimension_or_the_only_one():
    assert (class_dim(3), class_dim(1)) == (1, 0)


@pytest.mark.mpi
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_is_over_the_targets_that_are_not_ignored(P_world, comm, weighted):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    weight = torch.rand(4, dtype=F64) if weighted else None
    x, target = torch.randn(7, 4, dtype=F64).log_softmax(1), torch.randint(0, 4, (7,))
    target[0] = 0
    rows = Decomposition.balanced(P_x, x.shape).slices()[0]
    value = loss_of(P_x, F.nll_loss)(EVERYTHING, x[rows], target[rows], weight=weight)
    agree(value, F.nll_loss(x, target, weight, ignore_index=3))


@pytest.mark.mpi
def test_split_classes_need_no_message_where_the_decomposition_is_known(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    x, target = torch.randn(5, 4, dtype=F64), torch.randint(0, 3, (5,))
    source = Decomposition.balanced(P_x, x.shape)
    loss = loss_of(source, F.cross_entropy, (F64, I64))
    assert loss.target == index_blocks(source, 1)
    whole, local = x.clone().requires_grad_(), shard(P_x, x).requires_grad_()
    expected = F.cross_entropy(whole, target, ignore_index=3)
    expected.backward()
    value = loss(EVERYTHING, local, target, weight=None)
    value.backward()
    agree(value, expected, "value")
    agree(local.grad, shard(P_x, whole.grad), "gradient")


@pytest.mark.mpi(min_size=2)
def test_class_indices_are_alike_on_ranks_that_split_the_classes(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    x, target = torch.randn(5, 4, dtype=F64), torch.zeros(5, dtype=I64)
    loss = loss_of(Decomposition.balanced(P_x, x.shape), F.cross_entropy, (F64, I64))
    with pytest.raises(ShapeError, match=f"'label': ranks 0 and {comm.size - 1} have different classes"):
        loss(EVERYTHING, shard(P_x, x), target + (comm.rank == comm.size - 1), weight=None)
    with pytest.raises(UnsupportedError, match="reduction='none' with classes split"):
        loss_of(Decomposition.balanced(P_x, x.shape), F.cross_entropy, (F64, I64), "none")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("probabilities", [False, True])
def test_tensors_that_do_not_fit_on_one_rank_are_an_error_on_all(P_world, comm, probabilities):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    x, target = torch.randn(5, 4, dtype=F64), torch.zeros(5, dtype=I64)
    source, dtypes = Decomposition.balanced(P_x, x.shape), (F64, F64 if probabilities else I64)
    loss = loss_of(source, F.cross_entropy, dtypes, ignore_index=-100)
    mine = shard(P_x, x)
    truth = mine.softmax(1) if probabilities else target
    for odd in (0, comm.size - 1):
        for given in ((mine, truth[: 5 - (comm.rank == odd)]), (mine[: 5 - (comm.rank == odd)], truth)):
            with pytest.raises(ShapeError, match="input has shape" if comm.rank == odd else "none"):
                loss(EVERYTHING, *given, weight=None)
        loss(EVERYTHING, mine, truth, weight=None)


@pytest.mark.mpi
def test_copies_of_split_classes_count_once_and_probabilities_are_gathered_too(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((copies := 2 - comm.size % 2, comm.size // copies))
    x, target = torch.randn(2, 5, 4, dtype=F64).softmax(2)
    source = Decomposition(P_x, (Balanced(5, 1), Balanced(4, P_x.shape[1])), (None, 1))
    loss = loss_of(source, F.cross_entropy, (F64, F64), ignore_index=-100)
    assert loss.target == source
    whole, local = x.clone().requires_grad_(), x[source.slices()].clone().requires_grad_()
    truth, mine = target.clone().requires_grad_(), target[source.slices()].clone().requires_grad_()
    expected = F.cross_entropy(whole, truth)
    expected.backward()
    value = loss(EVERYTHING, local, mine, weight=None)
    value.backward()
    agree(value, expected, "value")
    first = P_x.index[0] == 0
    agree(local.grad, whole.grad[source.slices()] * first, "gradient")
    agree(mine.grad, truth.grad[source.slices()] * first, "gradient of the target")


@pytest.mark.mpi(min_size=2)
def test_first_ranks_get_whole_classes_and_gradients_go_back(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    x = torch.randint(-9, 9, (2, 5, 3)).double()
    source = Decomposition.balanced(P_x, x.shape)
    assert whole_classes(source, 1).box(0) == Box.of_shape(x.shape)
    (gather,) = loss_of(source, F.cross_entropy, (F64, I64)).movements()
    local = shard(P_x, x).requires_grad_()
    y = gather(local, needs_grad=True)
    assert torch.equal(y, x) if comm.rank == 0 else y.numel() == 0
    y.backward(x if comm.rank == 0 else torch.zeros_like(y))
    assert torch.equal(local.grad, shard(P_x, x))

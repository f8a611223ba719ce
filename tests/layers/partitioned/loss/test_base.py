"""Losses with a global mean."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import MismatchError, ShapeError, UnsupportedError, layers, zero_volume_tensor
from distdl_rma.layers import (
    DistributedBCELoss,
    DistributedCrossEntropyLoss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
)
from distdl_rma.layers.partitioned.loss.base import DistributedLoss
from tests.fuzz.loss import CLASSES, ELEMENTWISE
from tests.layers.partitioned.every_layer import first
from tests.layers.partitioned.same_error import refused
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_an_idle_rank_can_call_backward_and_passes_no_elements(P_world, comm):
    P_x = first(P_world)
    x = (torch.ones(2, 2) if P_x.active else zero_volume_tensor()).requires_grad_()
    target = torch.zeros_like(x, requires_grad=True)
    loss_of = DistributedMSELoss(P_x)
    loss_of(x, target).backward()
    assert x.grad is not None and target.grad is not None
    assert DistributedMSELoss(P_x, "none")(x, target).shape == x.shape
    if not P_x.active:
        with pytest.raises(ShapeError, match=r"is not in P_x but passes a tensor of shape \(2, 2\)"):
            loss_of(torch.ones(2, 2), torch.ones(2, 2))
        for wrong in ((None, target), (x, None)):
            with pytest.raises(ShapeError, match=f"rank {comm.rank}: "):
                loss_of(*wrong)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_rank_whose_input_needs_no_gradient_can_call_backward(P_world, comm, reduction, cut):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1) if cut == 0 else (1, comm.size))
    x, target = torch.rand(3, 4), torch.arange(3)
    losses = [(DistributedMSELoss(P_x, reduction), torch.zeros(3, 4))]
    if cut == 0 or reduction != "none":
        losses.append((DistributedCrossEntropyLoss(P_x, reduction=reduction), target))
    for loss_of, wanted in losses:
        for learns in (0, comm.size - 1):
            local = x.clone().requires_grad_(comm.rank == learns)
            loss_of(local, wanted).sum().backward()
            assert (local.grad is None) == (comm.rank != learns)
        assert not loss_of(x, wanted).requires_grad


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def sample(kind, dtype):
    """Arguments of a loss and of its sequential twin."""
    x = torch.rand(64, 9).sigmoid()
    x = x.log_softmax(1) if kind in ("NLLLoss", "KLDivLoss") else x
    target = torch.randint(0, 9, (64,)) if kind in CLASSES else torch.rand(64, 9).to(dtype)
    return x.to(dtype), target


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ELEMENTWISE + CLASSES)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_and_autocast_are_torchs_and_sums_are_as_good_as_in_float32(
    P_world, comm, kind, dtype, autocast
):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x, target = sample(kind, dtype)
    rows = slice(comm.rank, None, comm.size)
    local = x[rows].clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        theirs = getattr(nn, kind)()(x, target)
        loss = getattr(layers, f"Distributed{kind}")(P_x)(local, target[rows])
    assert loss.dtype == theirs.dtype
    loss.backward()
    wide, truth = x.double().requires_grad_(), target.double() if target.is_floating_point() else target
    expected = getattr(nn, kind)()(wide, truth)
    expected.backward()
    tolerance = TOLERANCES[loss.dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    assert local.grad.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(local.grad.double(), wide.grad[rows], rtol=tolerance, atol=tolerance / 100)


def wrong(kind, x, target):
    """What one rank may do wrong, and the words for it."""
    yield x, target[:-1], r"input has shape \(3, 4\) but target \(2,"
    yield x[0], target, r"input of shape \(4,\) has 1 dimensions but P_x \(.*, 1\) has 2"
    yield x.long(), target, "input is torch.int64 but a loss needs floating point"
    if kind == "BCELoss":
        yield x, target - 1, "all elements of target should be between 0 and 1"
        yield x * torch.nan, target, "all elements of input should be between 0 and 1"
    if kind in CLASSES:
        yield x, target + 3, "Target . is out of bounds"


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("kind", ELEMENTWISE + CLASSES)
def test_what_is_wrong_on_one_rank_is_refused_on_all_in_the_same_words(P_world, comm, kind):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    last = comm.size - 1
    loss = getattr(layers, f"Distributed{kind}")(P_x, name="fidelity")
    x = torch.full((3, 4), 0.25)
    target = torch.tensor([0, 1, 3]) if kind in CLASSES else x
    for bad_x, bad_target, words in wrong(kind, x, target):
        one = (bad_x, bad_target) if comm.rank == last else (x, target)
        refused(comm, loss, *one, rf"'fidelity': rank {last}: .*{words}")
    if comm.size > 1:
        other = x.double() if comm.rank == last else x
        words = rf"'fidelity': input: rank 0 passes torch.float32 but rank {last} torch.float64"
        refused(comm, loss, other, target.to(other.dtype) if kind in ELEMENTWISE else target, words)
        other = target.to(torch.int32 if kind in CLASSES else torch.float64) if comm.rank == last else target
        refused(comm, loss, x, other, rf"'fidelity': target: rank 0 passes .* but rank {last} torch")
        other, fits = x[:, : 4 - (comm.rank == last)], torch.zeros(3, dtype=torch.int64)
        words = "'fidelity': input: .* must agree in dimension 1"
        refused(comm, loss, other, fits if kind in CLASSES else other, words)
    if kind in CLASSES:
        # What all ranks pass alike.
        refused(comm, loss, x, target.int(), "'fidelity': expected .* Int")
    values = comm.allgather(loss(x, target).item())
    assert len(set(values)) == 1


def test_second_derivatives_are_those_of_the_loss_and_of_no_function_of_it(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    loss = DistributedMSELoss(P_x, name="fidelity")
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(3 * loss(x, torch.zeros_like(x)), x, create_graph=True)[0]
    agree(torch.autograd.grad(gradient.sum(), x)[0], torch.full_like(x, 6 / (5 * comm.size)))
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(loss(x, torch.zeros_like(x)).square(), x, create_graph=True)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_build_a_loss_with_other_arguments_are_told(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    weight = torch.ones(2 * comm.size) + (comm.rank == 0)
    for loss in (
        DistributedPoissonNLLLoss(P_x, full=comm.rank == 0, name="counts"),
        DistributedBCELoss(P_x, weight, name="weighted"),
    ):
        with pytest.raises(MismatchError, match=loss.name):
            loss(torch.ones(2), torch.ones(2))


def test_a_loss_is_a_few_lines(P_world, comm):
    class DistributedSoftMarginLoss(DistributedLoss, nn.SoftMarginLoss):
        _function = staticmethod(F.soft_margin_loss)

    x, target = torch.randn(5, 3, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64)
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    agree(DistributedSoftMarginLoss(P_x)(shard(P_x, x), shard(P_x, target)), nn.SoftMarginLoss()(x, target))

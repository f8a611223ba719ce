"""Losses over classes."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ArgumentError, Machine, UnsupportedError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedCrossEntropyLoss, DistributedMSELoss, DistributedNLLLoss
from tests.layers.partitioned.same_error import refused
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("grid", ["batch", "classes"])
def test_mean_over_nothing_is_not_a_number_and_has_no_gradient(P_world, comm, grid):
    shape = (comm.size, 1, 1) if grid == "batch" else (1, comm.size, 1)
    P_x = P_world.create_cartesian_topology_partition(shape)
    x = shard(P_x, torch.randn(2, 5, 3)).requires_grad_()
    target = torch.full((x.shape[0], x.shape[2]), 255)
    loss = DistributedCrossEntropyLoss(P_x, ignore_index=255)(x, target)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert DistributedMSELoss(P_x)(x[:0], x[:0]).isnan()
    assert DistributedMSELoss(P_x, "sum")(x[:0], x[:0]) == 0


@pytest.mark.mpi(min_size=2)
def test_split_classes_send_two_numbers_a_row_forth_and_nothing_back(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    loss, counters = DistributedCrossEntropyLoss(P_x), Machine.of(P_world).segments.counters
    target, sent = torch.zeros(6, dtype=torch.int64), []
    for width in (1, 50):
        x = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
        for _ in range(3):
            before = counters.bytes_put
            value = loss(x, target)
            sent.append(counters.bytes_put - before)
            behind = vars(counters).copy()
            value.backward()
            assert vars(counters) == behind
    assert sent[2] == sent[5]


@pytest.mark.mpi(min_size=2)
def test_second_derivatives_are_refused_where_classes_are_split(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    x, loss = torch.randn(3, 2, 4, requires_grad=True), DistributedCrossEntropyLoss(P_x, label_smoothing=0.1)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(loss(x, torch.zeros(3, 4, dtype=torch.int64)), x, create_graph=True)


@pytest.mark.mpi(min_size=2)
def test_what_does_not_fit_is_refused_with_split_classes_too(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    loss, odd = DistributedNLLLoss(P_x, name="label"), comm.rank == comm.size - 1
    x, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    wrong = torch.zeros(2 + odd, 3)
    refused(comm, loss, wrong, target, rf"rank {comm.size - 1}: input has shape \(3, 3\) but target \(2,\)")
    refused(comm, loss, wrong, target.new_zeros(2 + odd), "'label': input: .* must agree in dimension 0")
    refused(comm, loss, x, target[: 2 - odd], r"input has shape \(2, 3\) but target \(1,\), wanted \(2,\)")
    refused(comm, loss, x.double() if odd else x, target, "torch.float32 but rank . torch.float64")
    refused(comm, loss, x, x if odd else target, r"target \(2, 3\), wanted \(2,\)")
    refused(comm, loss, x, target + odd, "ranks 0 and .* must have the same class indices, but they differ")
    for wrong in (99, -1):
        refused(comm, loss, x, target + wrong, f"rank 0: Target {wrong} is out of bounds")
    # What torch refuses beside all classes.
    refused(comm, loss, x, target.int(), "'label': expected .* Int")
    refused(comm, loss, x.cfloat(), target, "not implemented for 'ComplexFloat'")
    short = DistributedNLLLoss(P_x, torch.ones(comm.size + 1))
    refused(comm, short, x, target, "weight tensor should be defined")
    assert loss(x.requires_grad_(), target) == 0


@pytest.mark.parametrize("grid", ["batch", "classes"])
def test_arguments_may_be_changed_later(P_world, comm, grid):
    shape = (comm.size, 1) if grid == "batch" else (1, comm.size)
    P_x = P_world.create_cartesian_topology_partition(shape)
    x, target = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    loss, rows = DistributedCrossEntropyLoss(P_x), Decomposition.balanced(P_x, x.shape).slices()[0]
    assert loss(shard(P_x, x), target[rows]).item() == pytest.approx(F.cross_entropy(x, target).item())
    loss.ignore_index, loss.reduction = 3, "sum"
    expected = F.cross_entropy(x, target, ignore_index=3, reduction="sum")
    assert loss(shard(P_x, x), target[rows]).item() == pytest.approx(expected.item())
    with pytest.raises(ArgumentError, match=r"reduction is one of .* got 'batchmean'"):
        loss.reduction = "batchmean"
    loss.reduction = "none"
    expected = F.cross_entropy(x, target, ignore_index=3, reduction="none")
    # Where classes are cut, all their ranks have the losses of the rows.
    torch.testing.assert_close(loss(shard(P_x, x), target[rows]), expected[rows])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reduction", "mean"),
        ("label_smoothing", 0.5),
        ("ignore_index", 0),
        ("weight", torch.tensor([1.0, 2.0])),
    ],
)
@pytest.mark.parametrize("grid", ["batch", "classes"])
def test_arguments_that_one_rank_changes_are_refused_on_all(P_world, comm, grid, key, value):
    shape = (comm.size, 1) if grid == "batch" else (1, comm.size)
    P_x = P_world.create_cartesian_topology_partition(shape)
    loss = DistributedCrossEntropyLoss(P_x, torch.ones(2), reduction="sum", label_smoothing=0.25)
    x, target = (
        torch.ones(3, 2 if grid == "batch" else len(range(comm.rank, 2, comm.size))),
        torch.ones(3).long(),
    )
    before, first = getattr(loss, key), loss(x, target)
    if comm.rank == comm.size - 1:
        setattr(loss, key, value)
    refused(comm, loss, x, target, rf"rank 0 passes .*{key}=.* but rank {comm.size - 1} .*{key}=")
    setattr(loss, key, before)
    assert loss(x, target) == first

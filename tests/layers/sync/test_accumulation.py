"""Gradients on top of others: accumulated, not summed yet, or summed already."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine, ProtocolError
from tests.layers.sync.training import alone, close_to, make

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("way", ["accumulate", "no_sync", "no_sync twice, cleared to zero"])
def test_accumulated_gradients_are_the_sequential_sum(P_world, comm, way):
    model, sync, loss_of = make(P_world, comm)
    sequential, loss_alone = alone()
    if way == "no_sync twice, cleared to zero":
        loss_of(3).backward()
        model.zero_grad(set_to_none=False)
    with nullcontext() if way == "accumulate" else sync.no_sync():
        loss_of(0).backward()
        loss_of(1).backward()
    loss_of(2).backward()
    for at in range(3):
        loss_alone(at).backward()
    close_to((p.grad for p in model.parameters()), (p.grad for p in sequential.parameters()))
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_no_sync_on_top_of_a_synchronised_gradient_is_refused(P_world, comm):
    model, sync, loss_of = make(P_world, comm)
    loss_of().backward()
    loss = loss_of()
    with pytest.raises(ProtocolError, match=r"call optimizer.zero_grad\(\) first"), sync.no_sync():
        loss.backward()
    model.zero_grad()
    comm.Barrier()
    sync.close()


@pytest.mark.parametrize("summed", [True, False])
def test_gradients_outlive_the_machine(comm, summed):
    with Machine(comm, segment_size="4MiB") as machine:
        plain = nn.Linear(3, 2)
        sync = GradientSync(plain, machine)
        with nullcontext() if summed else sync.no_sync():
            plain(torch.ones(1, 3)).sum().backward()
    assert plain.weight.grad[0, 0].item() == (comm.size if summed else 1)
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["before", "replaced", "scaled", "new sync"])
def test_gradients_that_are_there_already_are_not_summed_again(P_world, comm, way):
    plain = nn.Linear(3, 2)
    plain.load_state_dict(nn.Linear(3, 2).state_dict())
    x = torch.full((1, 3), 1.0 + comm.rank)
    total = sum(1.0 + rank for rank in range(comm.size))
    if way == "before":
        plain.weight.grad = torch.full((2, 3), 5.0)
        sync, there = GradientSync(plain, P_world), 5.0
    else:
        sync, there = GradientSync(plain, P_world), total
        plain(x).sum().backward()
    if way == "replaced":
        plain.weight.grad = plain.weight.grad.clone()
    if way == "scaled":
        plain.weight.grad = plain.weight.grad / 2
        there = total / 2
    if way == "new sync":
        sync.close()
        sync = GradientSync(plain, P_world)
    plain(x).sum().backward()
    assert plain.weight.grad[0, 0].item() == pytest.approx(there + total)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_closing_with_unsummed_gradients_is_refused(P_world, comm):
    model, sync, loss_of = make(P_world, comm)
    with sync.no_sync():
        loss_of().backward()
    with pytest.raises(ProtocolError, match=r"gradients from no_sync\(\), which the next"):
        sync.close()
    model.zero_grad()
    sync.close()

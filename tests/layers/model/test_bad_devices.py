"""Tensors on the wrong device, and a device that is full: an error on all ranks, and nothing is lost."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import (
    ConfigurationError,
    DistdlError,
    Machine,
    MismatchError,
    PeerFailedError,
    ShapeError,
    ShardLoader,
    SplitTensor,
    UnsupportedError,
    distribute,
    shard,
)
from tests.fake_device import NAME, needs_fake_device, traffic
from tests.jobs.data.test_loader import made
from tests.layers.test_devices import on

pytestmark = [pytest.mark.mpi, needs_fake_device]
X = torch.rand(1, 1, 12, 4, generator=torch.Generator().manual_seed(1))


class Conditional(nn.Module):
    """Adds a vector, which is a plain input, to its channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x, by=None):
        y = self.first(x)
        return self.last(y if by is None else y + by[:, :, None, None])


@pytest.fixture
def split(P_world, device):
    model = distribute(Conditional().to(device), {"H": -1})
    yield model
    model.distributed.close()


@pytest.fixture
def last(comm):
    return comm.rank == comm.size - 1


def rows(machine):
    """The ranks of a machine, which cut the height."""
    return machine.partition().create_cartesian_topology_partition((1, 1, machine.size, 1))


def fine(split, device):
    return split(X.to(device), torch.ones(1, 2).to(device)).device == device


def test_inputs_on_two_devices(split, device, last):
    by = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="device"):
        split(X.to(device), by)
    with pytest.raises(
        MismatchError, match=rf"\(1, 2\) of torch.float32 on {NAME}:0.*\(1, 2\) of torch.float32,"
    ):
        split(X.to(device), by if last else by.to(device))
    for x in (X, shard({"H": -1}, X)):
        with pytest.raises(
            ShapeError, match=rf"\(1, 1, 12, 4\) is on cpu, but the model is on {NAME}:0; move"
        ):
            split(x)
    with pytest.raises(MismatchError, match=f"{NAME}:0"):
        split(X if last else X.to(device))
    with pytest.raises(MismatchError, match=f"on {NAME}:0, .* over dim 2.*torch.float32, .* over dim 2"):
        split(shard({"H": -1}, X if last else X.to(device)))
    where = f"on {NAME}:0, .* on cpu: move them"
    with pytest.raises(UnsupportedError, match=f"mse_loss.*its tensors are .* {where}"):
        F.mse_loss(split(X.to(device)), X)
    assert fine(split, device)


@pytest.mark.parametrize("error", [ConfigurationError, MismatchError])
def test_a_model_that_is_moved_in_part_on_all_ranks_or_one(split, device, last, error):
    if last or error is ConfigurationError:
        split.last.to("cpu")
    with pytest.raises(error, match=rf"'last.weight' is on cpu, but others are on {NAME}:0: move"):
        split(X.to(device))
    if error is ConfigurationError:
        assert fine(split.to(device), device)


def test_a_model_that_is_moved_on_one_rank(split, device, last):
    if last:
        split.to("cpu")
    with pytest.raises(MismatchError, match="the model is on cpu"):
        split(X if last else X.to(device))


def test_a_model_that_all_ranks_move_computes_there(split, device):
    split(X.to(device)).sum().backward()
    wanted = split.first.weight.grad.cpu()
    split.zero_grad()
    split.to("cpu")
    split(X).sum().backward()
    assert split.first.weight.grad.is_cpu
    torch.testing.assert_close(split.first.weight.grad, wanted)


def test_blocks_without_memory(split, P_world, device, last):
    meta = X.to("meta")
    with pytest.raises(ShapeError, match="is on device meta, wanted a tensor with memory"):
        split(meta)
    with pytest.raises(MismatchError, match=r"torch.float32 on meta"):
        split(meta if last else X.to(device))
    with pytest.raises(MismatchError, match="the ranks call it in different ways"):
        split(X.to_sparse() if last else X)
    grid = rows(Machine.of(P_world))
    for make in (lambda: shard(grid, meta), lambda: SplitTensor.from_local(meta, grid)):
        with pytest.raises(ShapeError, match="is on device meta, wanted a tensor with memory"):
            make()
    with pytest.raises(UnsupportedError, match=r"Tensor.to.*on the device meta has no memory"):
        shard(grid, X.to(device)).to("meta")
    assert fine(split, device)


def test_a_device_that_one_rank_lacks(P_world, device, last):
    model = Conditional()
    if not last:
        model.last.to(device)
    with pytest.raises(ConfigurationError, match=f"'last.weight' is on {NAME}:0, but others are on cpu"):
        distribute(model, {"H": -1})
    if last:
        with pytest.raises(AssertionError, match="CUDA"):
            model.to("cuda:7")
    else:
        model.to(device)
    # The last rank goes on without the device.
    with pytest.raises(ConfigurationError, match=f"device: {NAME} on rank 0, but cpu on rank"):
        distribute(model, {"H": -1})


@pytest.mark.parametrize("room", [0, 2, 9, 25, 40])
def test_a_full_device_of_one_rank_is_an_error_on_all_and_nothing_is_lost(comm, device, last, room):
    torch.manual_seed(0)
    alone, x = Conditional(), X.to(device)
    machine = Machine(comm)
    split = distribute(on(device, alone), rows(machine))
    split(x).square().sum().backward()
    split.zero_grad()
    traffic().room = room if last else float("inf")
    try:
        with pytest.raises((torch.OutOfMemoryError, PeerFailedError), match="out of memory") as found:
            split(x).square().sum().backward()
    finally:
        traffic().room = float("inf")
    text = str(found.value)
    assert isinstance(found.value, torch.OutOfMemoryError) == last
    assert "smaller batches, more ranks, or distdl_rma.spill()" in text
    assert re.search(rf"\(.*\) of torch.float32 on {NAME}:0|Conditional", text), text
    for one, other in zip(split.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach())
    # As the message says, once all have raised.
    comm.Barrier()
    with suppress(PeerFailedError):
        machine.close()
    machine.close()
    split.distributed.close()
    with Machine(comm) as machine:
        split = distribute(split, rows(machine))
        split.zero_grad()
        split(x).square().sum().backward()
        alone(X).square().sum().backward()
        torch.testing.assert_close(split.first.weight.grad.cpu(), alone.first.weight.grad)
        split.distributed.close()


def test_a_full_device_in_a_loader_is_an_error_on_all(P_world, device, last):
    loader = ShardLoader(made(), 5, prefetch=0, device=device)
    traffic().room = 0 if last else float("inf")
    try:
        with pytest.raises(DistdlError, match="OutOfMemoryError: FAKE out of memory"):
            next(iter(loader))
    finally:
        traffic().room = float("inf")
    assert len(list(loader)) == 2

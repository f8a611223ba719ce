"""Steps of distributed models with saved tensors on disk: the same bits, and one outcome on all ranks."""

import gc
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    ConfigurationError,
    DataError,
    Machine,
    MPIPartition,
    PeerFailedError,
    distribute,
    rehearse,
    spill,
)
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMaxPool2d
from tests.layers.model.nets import UNet

ALL = pytest.mark.sizes(1, 2, 3, 4)
ABOVE = 256


class Norms(nn.Module):
    """Statistics, windows, dropout, and functions whose autograd functions save results."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1, stride=2)
        self.norms = nn.ModuleList([nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)])
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        y = self.stem(x)
        for norm in self.norms:
            y = F.silu(norm(y))
        y = F.avg_pool2d(F.pad(self.up(y), (1, 1, 1, 1), mode="reflect"), 3, stride=1)
        y = y * torch.softmax(y, dim=2) + torch.logsumexp(y, dim=(2, 3), keepdim=True)
        y = y + y.amax(2, keepdim=True)
        return self.head(y.flatten(2)[:, :, :12]).log_softmax(-1) - y.square().sum(dim=(1, 2, 3)).sqrt().sum()


class Cubed(torch.autograd.Function):
    """A user's function, which saves split tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, y := x * x)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x * x + 2 * y)


class Checkpointed(nn.Module):
    """Checkpoints of split tensors with a graph, one within another."""

    def __init__(self):
        super().__init__()
        self.stem, self.last, self.body = (
            nn.Conv2d(1, 4, 3),
            nn.Conv2d(4, 1, 3),
            nn.Conv2d(4, 4, 3, padding=1),
        )

    def forward(self, x):
        y = checkpoint(self.middle, self.stem(x).tanh(), use_reentrant=False)
        return self.last(Cubed.apply(y.exp()))

    def middle(self, y):
        z = checkpoint(lambda y: self.body(y).sin() * y, y.exp(), use_reentrant=False)
        return y + self.body(Cubed.apply(z))


NETS = {"unet": UNet, "norms": Norms, "checkpointed": Checkpointed}


def inputs(name):
    torch.manual_seed(5)
    return torch.randn(2, 2 if name == "norms" else 1, 21, 18)


def bits(model, x, inner=None):
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(8)
    with inner if inner is not None else torch.enable_grad():
        loss = model(x).square().mean()
        loss.backward()
    return [loss.full_tensor().detach(), *(p.grad for p in model.parameters())]


def equal(first, second):
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


@pytest.mark.mpi
@ALL
@pytest.mark.parametrize("axis", ["H", "W"])
@pytest.mark.parametrize("name", NETS)
def test_a_distributed_model_has_the_same_bits(comm, tmp_path, name, axis):
    torch.manual_seed(2)
    model = distribute(NETS[name](), {axis: -1})
    x = inputs(name)
    disk = spill(tmp_path, ABOVE)
    bits(model, x)
    for _ in range(2):
        equal(bits(model, x, disk), bits(model, x))
    assert disk.written_nbytes > 0
    if name == "checkpointed":
        with disk:
            # The input of the checkpoint and the results behind it are on disk, nothing of its inside.
            loss = model(x).square().mean()
        assert len(disk._pieces) < 9
        del loss
    gc.collect()
    assert not disk._saved
    model.distributed.close()


@pytest.mark.mpi
@ALL
def test_layers_with_uneven_shards_and_ranks_without_any(comm, tmp_path):
    P_world = MPIPartition(comm)
    some = range(max(1, comm.size - 1))
    P_x = P_world.create_partition_inclusive(some).create_cartesian_topology_partition((1, 1, len(some), 1))
    torch.manual_seed(4)
    model = nn.Sequential(
        DistributedConv2d(P_x, 2, 6, 5, padding=2),
        DistributedInstanceNorm2d(P_x, 6, affine=True),
        nn.ReLU(inplace=True),
        DistributedMaxPool2d(P_x, 2),
        DistributedConv2d(P_x, 6, 3, 3, padding=1),
    )
    rows = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, 4 + 5 * comm.rank, 16, generator=rows) if P_x.active else torch.zeros(2, 0)
    disk = spill(tmp_path, ABOVE, machine=P_world)

    def step(inner):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(8)
        with inner:
            model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step(torch.enable_grad())
    for _ in range(3):
        equal(step(disk), expected)
    assert (disk.written_nbytes > 0) == P_x.active
    P_world.deactivate()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_a_full_disk_of_one_rank_fails_the_step_on_all_and_nothing_stays(comm, tmp_path):
    torch.manual_seed(2)
    model, x = distribute(UNet(), {"H": -1}), inputs("unet")
    last = comm.size - 1
    expected = bits(model, x)
    disk = spill(tmp_path, ABOVE, quota="32KiB" if comm.rank == last else None)
    for _ in range(2):
        with pytest.raises(DataError, match="the quota is used up") as caught:
            bits(model, x, disk)
        assert comm.rank == last or f"spill: rank {last}: scratch: writing" in str(caught.value)
        assert disk._scratch is None
        equal([p.grad for p in model.parameters()], expected[1:])
        equal(bits(model, x), expected)
    model.distributed.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_a_write_that_fails_late_on_one_rank_fails_the_step_on_all(comm, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    torch.manual_seed(2)
    model, x = distribute(UNet(), {"H": -1}), inputs("unet")
    expected, disk = bits(model, x), spill(tmp_path, ABOVE)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match="No space left on device"), disk:  # noqa: PT012
            model.zero_grad(set_to_none=True)
            loss = model(x).square().mean()
            disk._scratch.flush()
            loss.backward()
    equal([p.grad for p in model.parameters()], expected[1:])
    equal(bits(model, x, disk), expected)
    model.distributed.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_what_one_rank_cannot_open_is_refused_on_all(comm, tmp_path):
    Machine.on(comm)
    folder = tmp_path / "missing" if comm.rank == comm.size - 1 else tmp_path
    with pytest.raises(DataError, match=r"no file can be made in .*missing"):
        spill(folder)
    with pytest.raises(ConfigurationError, match="the quota is a whole number of bytes"):
        spill(tmp_path, quota=-1 if comm.rank == 0 else None)


def test_a_read_that_fails_on_one_rank_ends_the_step_on_all(tmp_path):
    def broken(*_):
        raise DataError("the disk is broken")

    def play(comm):
        torch.manual_seed(2)
        model, x = distribute(UNet(), {"H": -1}), inputs("unet")
        disk = spill(tmp_path, ABOVE)
        try:
            with disk:
                loss = model(x).square().mean()
                disk._scratch.flush()
                if comm.rank == 1:
                    disk._scratch._fetch = broken
                loss.backward()
        except (DataError, PeerFailedError) as error:
            return str(error)

    found = rehearse(3, play)
    assert found[1] == "the disk is broken"
    for rank in (0, 2):
        assert "rank 1 failed: " in found[rank]

"""Predictions and saved tensors on a device: the bits of the host, and what waits is not on the device."""

import gc
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    ConfigurationError,
    DataError,
    MismatchError,
    Source,
    distribute,
    open_array,
    plan_prediction,
    predict,
    spill,
)
from distdl_rma.__main__ import main
from distdl_rma.jobs.out_of_core.predict import Predictor
from distdl_rma.layers import staging
from tests.fake_device import NAME, needs_fake_device
from tests.fake_memory import allocated, limited, register
from tests.jobs.out_of_core.nets import Calls, Gated, seeded, whole

# A prediction itself runs virtual ranks.
pytestmark = [pytest.mark.mpi, pytest.mark.processes, pytest.mark.sizes(1, 2, 3), needs_fake_device]


class UNet(nn.Module):
    """One with a level, and a norm on it."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), norm(4)
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        return self.last(torch.cat([y, self.up(self.low(y))], 1))


# With the blocks of their predictions.
NETS = {
    "strides": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 2, 2, 2)), {"W": 3}),
    "u-net": (UNet, {"H": 2, "W": 2}),
    "batch norm": (lambda: UNet(nn.BatchNorm2d), {"H": 4}),
    "cumsum": (lambda: Calls(lambda x: x.cumsum(2)), {"H": 4}),
    "gated": (Gated, {"H": 3}),
    "instance norm": (lambda: UNet(nn.InstanceNorm2d), {"H": 4}),
}
# Statistics are summed in another order.
ROUNDED = {"instance norm"}


@pytest.fixture
def device(monkeypatch):
    # Copies without a wait for them are garbage.
    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME})
    # An engine that has begun before has no threads for the device, which is not needed here either.
    staging.backward_in_this_thread()
    return register()


def classes(y):
    return y.argmax(1).to(torch.uint8)


@pytest.mark.parametrize("net", NETS)
def test_a_prediction_has_the_numbers_of_one_on_the_host(comm, device, net):
    make, grid = NETS[net]
    model, x = seeded(make).double(), torch.randn(1, 64, 48, dtype=torch.float64)
    want = predict(model, x, grid=grid, comm=comm)
    torch.testing.assert_close(want, whole(model, x[None])[0])
    found = predict(model.to(device), x, grid=grid, comm=comm)
    assert found.device.type == "cpu" and next(model.parameters()).device == device
    torch.testing.assert_close(found, want, **({} if net in ROUNDED else {"rtol": 0, "atol": 0}))


def test_what_waits_is_on_the_host_and_on_disk(comm, device, folder):
    model, x = seeded(lambda: UNet(nn.InstanceNorm2d)), torch.randn(1800, 96)
    want = predict(model, x, grid={"H": 8}, comm=comm)
    model.to(device)
    plan = plan_prediction(model, x, memory="20MiB")
    assert plan.disk_nbytes > 1 << 22 and plan.slabs > 5
    with limited() as used:
        before = used.most
        predict(model, x, folder / "y.npy", memory="20MiB", comm=comm, scratch=folder)
    comm.Barrier()
    torch.testing.assert_close(torch.from_numpy(np.load(folder / "y.npy")), want, rtol=1e-4, atol=1e-5)
    # One slab, and nothing of those that wait.
    assert used.most - before < 2 * plan.whole_nbytes / plan.slabs < plan.memory
    gc.collect()
    assert allocated() <= before


def test_results_go_to_a_file_by_chunks_and_from_any_device_to_the_caller(comm, device, folder):
    pytest.importorskip("zarr")
    model, x = seeded(UNet).to(device), torch.randn(96, 40)
    options = {"post": classes, "grid": {"H": 5}, "comm": comm}
    want = predict(model.cpu(), x, **options)
    predict(model.to(device), x, folder / "y.zarr", chunks=(16, 16), **options)
    comm.Barrier()
    found = open_array(folder / "y.zarr")
    assert found.chunks[-2:] == (16, 16) and np.array_equal(found[:, :], want.numpy())
    y = Predictor(**options)(x[None, None].to(device), model)
    assert y.device == device and torch.equal(y.cpu()[0], want)


def test_a_device_that_is_full_on_one_rank_is_an_error_on_all_and_a_later_call_goes_on(comm, device, folder):
    model, x, reads = seeded(UNet), np.random.default_rng(0).random((400, 20), np.float32), []
    want = predict(model, x, grid={"H": 12}, comm=comm)
    model.to(device)

    def read(box):
        reads.append(box)
        # Its first slab has ended, since each is read one ahead.
        if len(reads) == 3 and comm.rank == comm.size - 1:
            full.enter_context(limited(1 << 10))
        return x[box]

    source = Source(x.shape, x.dtype, read)
    with ExitStack() as full, pytest.raises(ConfigurationError) as raised:
        predict(model, source, folder / "y.npy", grid={"H": 12}, comm=comm)
    said = str(raised.value)
    for part in (f"{NAME}:0 has no memory left", "slab of (1, 1, ", ", 20)", "FAKE", "memory=", "grid="):
        assert part in said
    comm.Barrier()
    assert sorted(each.name for each in folder.iterdir()) == ["y.npy.part", "y.npy.progress"]
    comm.Barrier()
    before = len(reads)
    predict(model, source, folder / "y.npy", grid={"H": 12}, comm=comm)
    comm.Barrier()
    assert np.array_equal(np.load(folder / "y.npy"), want.numpy())
    assert comm.allreduce(len(reads) - before) < 12


def test_a_device_that_is_full_for_the_crop_is_no_reason_for_other_slabs(comm, device):
    model, x = seeded(UNet).to(device), torch.randn(3, 1, 96, 64)
    with limited(1 << 12), pytest.raises(ConfigurationError, match=f"{NAME}:0 has no memory left"):
        predict(model, x, comm=comm)


def test_a_model_on_two_devices_is_refused_on_all_ranks(comm, device):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
    if comm.rank == 0:
        model[1].to(device)
    wanted = f"'1.weight' is on {NAME}:0, but others are on cpu: move the model to one device"
    with pytest.raises(ConfigurationError, match=wanted):
        predict(model, torch.rand(40, 30), comm=comm)
    if comm.rank == 0:
        with pytest.raises(ConfigurationError, match=wanted):
            plan_prediction(model, torch.rand(40, 30))
        model[0].to(device)
    if comm.size > 1:
        with pytest.raises(MismatchError, match="the type of the device"):
            predict(model, torch.rand(40, 30), comm=comm)


def test_a_memory_that_is_too_small_is_refused_as_on_the_host(comm, device):
    with pytest.raises(ConfigurationError, match=r"memory=1\.0 MiB is too small"):
        predict(seeded(UNet).to(device), torch.rand(400, 300), memory="1MiB", comm=comm)


def test_the_command_takes_a_device(comm, device, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    x = np.random.default_rng(0).random((96, 20), np.float32)
    if comm.rank == 0:
        np.save("x.npy", x)
    comm.Barrier()
    arguments = ["predict", f"{__name__}:made", "--in", "x.npy", "--grid", "4x1", "--quiet", "--device"]
    assert main([*arguments, NAME, "--out", "y.npy"]) == 0
    comm.Barrier()
    assert MADE[-1].first.weight.device == device
    assert np.array_equal(np.load("y.npy"), predict(MADE[-1].cpu(), x, grid={"H": 4}, comm=comm))
    assert main([*arguments, "toaster", "--out", "z.npy"]) == 1
    error = capsys.readouterr().err
    assert ("--device toaster: RuntimeError: Expected one of cpu, " in error) == (comm.rank == 0)


MADE = []


def made():
    """The model of the command."""
    MADE.append(seeded(Gated))
    return MADE[-1]


def outcome(model, x, retain=False):
    """Loss, its gradients and the device's peak, of a step."""
    model.zero_grad()
    with limited() as used:
        before = used.most
        loss = model(x).square().mean()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
    of_parameters = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return [loss.detach().cpu(), *of_parameters], used.most - before


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for each in self:
            x = checkpoint(each, x, use_reentrant=False)
        return x


LAYERS = {
    "u-net": lambda: UNet(nn.BatchNorm2d),
    "transformer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "checkpoint": lambda: Checkpointed(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))),
}


@pytest.mark.parametrize("net", LAYERS)
@pytest.mark.parametrize("retain", [False, True])
def test_saved_tensors_wait_on_disk_and_not_on_the_device(comm, device, tmp_path, net, retain):
    model = seeded(LAYERS[net]).to(device)
    x = torch.randn((4, 60, 16) if net == "transformer" else (2, 1, 64, 48)).to(device)
    step = partial(outcome, model, x, retain)
    step()
    want, most = step()
    with spill(tmp_path, "4KiB", machine=None) as disk:
        for _ in range(2):
            found, used = step()
            assert all(map(torch.equal, found, want))
    assert disk.written_nbytes > 1 << 14
    assert net != "u-net" or used < 0.7 * most
    gc.collect()
    assert len(disk._saved) == len(disk._pieces) == 0


def test_saved_split_tensors_wait_on_disk_too(comm, P_world, device, tmp_path):
    model = distribute(seeded(LAYERS["u-net"]).to(device), {"H": -1})
    x = torch.randn(2, 1, 64, 48, generator=torch.Generator().manual_seed(0)).to(device)
    want, _ = outcome(model, x)
    with spill(tmp_path, "4KiB") as disk:
        found, _ = outcome(model, x)
    assert disk.written_nbytes > 1 << 16 and all(map(torch.equal, found, want))
    with pytest.raises(DataError, match="quota"), spill(tmp_path, "4KiB", quota="64KiB"):
        outcome(model, x)
    model.distributed.close()

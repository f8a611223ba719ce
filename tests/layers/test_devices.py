"""Split tensors on a device: the numbers of one process; edges, statistics and gradients come down."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import GradientSync, UnsupportedError, distribute, shard
from distdl_rma.layers import staging
from tests.fake_device import counted, needs_fake_device
from tests.layers.model.nets import UNet

pytestmark = [
    pytest.mark.mpi,
    needs_fake_device,
    # Of torch's own kernel of a squared error on a device made of Python.
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


def unet(dims, norm, drop=None):
    net = UNet(dims, norm, classes=1, bilinear=True)
    net.last = nn.Sequential(drop or nn.Identity(), net.last)
    return net.double()


def on(device, model):
    # A deep copy, made on the host.
    return copy.deepcopy(model).to(device)


def batch(dims, step):
    source = torch.Generator().manual_seed(step)
    space = (16, 12, 8)[:dims]
    return torch.rand(2, 2, 1, *space, generator=source, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dims", "norm"), [(2, "batch"), (2, "group"), (2, "instance"), (1, "batch"), (3, "group")]
)
def test_training_on_a_device_gives_what_one_process_gives(P_world, device, monkeypatch, dims, norm):
    torch.manual_seed(1)
    alone = unet(dims, norm)
    split = distribute(on(device, alone), {"DHW"[3 - dims]: -1})
    optimizers = [torch.optim.Adam(model.parameters()) for model in (alone, split)]
    for step in range(3):
        # The last step copies as to and from a device without asynchronous copies.
        monkeypatch.setattr(staging, "ASYNCHRONOUS", {device.type} if step < 2 else set())
        x, wanted = batch(dims, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        y, expected = split(x.to(device)), alone(x)
        torch.testing.assert_close(y.full_tensor().cpu(), expected)
        F.mse_loss(expected, wanted).backward()
        loss = F.mse_loss(y, wanted.to(device))
        loss.backward()
        assert y.device == loss.device == device
        for p, other in zip(split.parameters(), alone.parameters(), strict=True):
            assert p.device == p.grad.device == device
            torch.testing.assert_close(p.grad.cpu(), other.grad)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(split.state_dict().values(), alone.state_dict().values(), strict=True):
        assert one.device == device
        torch.testing.assert_close(one.cpu(), other)
    split.distributed.close()


def test_only_edges_statistics_and_gradients_are_copied(P_world, comm, device):
    torch.manual_seed(1)
    parts = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3, padding=1)
    split = distribute(nn.Sequential(*parts).double().to(device), {"H": -1})
    for step in range(3):
        x, wanted = batch(2, step)
        with counted() as moved:
            x, wanted = torch.cat([x, x], 1).to(device), wanted.to(device)
            F.mse_loss(split(x), wanted).backward()
    word, neighbours = 8, (comm.rank > 0) + (comm.rank < comm.size - 1)
    # Of both convolutions forward; the input needs no gradient, so that one edge goes back.
    edges = neighbours * 2 * 12 * (2 + 4 + 4)
    statistics = 2 * 2 * 4  # two of each channel, forward and back
    weights = 2 * 4  # of the norm, whose factors are computed in double precision
    number = sum(p.numel() for p in split.parameters())
    assert split[0].weight.grad.device == device
    # Some elements of what every rank has whole, the input and what is wanted, which ranks compare.
    sampled = sum(len(range(0, n, n // 256)) for n in (x.numel(), wanted.numel()))
    loss = 1
    assert moved.down_nbytes == word * (edges + statistics + weights + number + sampled + loss)
    assert moved.downs <= 3 + 2 + 2 + 2 + 2
    given = x.numel() + wanted.numel()
    # Of each channel: factor, shift, and the two running statistics; then two means of gradients, and the
    # gradients of weight and bias, which were summed with them.
    norm = (4 + 2 + 2) * 4
    assert moved.up_nbytes == word * (given + edges + norm + number + loss)
    assert moved.ups <= 2 + 3 + 4 + 3 + 1 + 1
    split.distributed.close()


def test_functions_of_split_tensors_leave_them_on_their_device(P_world, device):
    whole = torch.rand(2, 4, 9, 6, dtype=torch.float64)
    x = shard({"H": -1}, whole.to(device))
    w = whole.detach().requires_grad_()
    x.requires_grad_()

    def of(a, like):
        return [
            a.mean(),
            a.sum(2),
            a.var((0, 2, 3)),
            a.amax(2),
            a.max(),
            a.norm(),
            torch.cat([a, a * 2], 2)[:, :, 3:11],
            a[:, 1:3, ::2],
            a.transpose(1, 2).reshape(2, 9, -1),
            a.softmax(2),
            F.avg_pool2d(a, 3, 2, 1),
            F.max_pool2d(a, 3, 1, 1),
            F.adaptive_avg_pool2d(a, 3),
            F.adaptive_max_pool2d(a, 2),
            F.interpolate(a, scale_factor=(1.7, 2.0), mode="bilinear"),
            F.interpolate(a, (5, 4), mode="nearest"),
            F.pad(a, (1, 1, 2, 2), "reflect"),
            F.layer_norm(a, (9, 6)),
            F.cross_entropy(a, (like * 3).long()[:, 0].to(a.device)),
            F.l1_loss(a, like.to(a.device)),
            a.where(a > 0.5, a.new_zeros(())),
            a.cumsum(2),
        ]

    found, wanted = of(x, whole), of(w, whole)
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.device == device, at
        torch.testing.assert_close(one.full_tensor().cpu(), other, msg=lambda text, n=at: f"{n}: {text}")
    sum(one.square().sum() for one in found).backward()
    sum(other.square().sum() for other in wanted).backward()
    assert x.grad.device == device
    torch.testing.assert_close(x.grad.full_tensor().cpu(), w.grad)


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)])
def test_draws_on_a_device_are_those_of_the_host(P_world, device, drop):
    whole = torch.rand(2, 4, 9, 6, dtype=torch.float64)
    torch.manual_seed(5)
    here = drop(shard({"H": -1}, whole)).full_tensor()
    torch.manual_seed(5)
    there = drop(shard({"H": -1}, whole.to(device))).full_tensor()
    assert torch.equal(here, there.cpu())


def test_tensors_move_between_cuts_on_the_device(P_world, comm, device):
    whole = torch.rand(3, 2, 7, 5).to(torch.bfloat16)
    x = shard({"H": -1}, whole.to(device))
    y = x.redistribute(None, None, None, 3)
    assert (x.device, y.device, y.to_local().device) == (device,) * 3
    assert torch.equal(y.full_tensor().cpu(), whole)


def test_gradients_of_a_plain_model_are_summed_on_the_device(P_world, comm, device):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    sync = GradientSync(model, P_world)
    alone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    alone.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    parts = torch.rand(comm.size, 5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.zero_grad()
        model(parts[comm.rank].to(device)).square().sum().backward()
    alone(parts.flatten(0, 1)).square().sum().backward()
    for p, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad.device == device
        torch.testing.assert_close(p.grad.cpu(), other.grad)
    norm = sync.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
    torch.testing.assert_close(model[0].weight.grad.cpu(), alone[0].weight.grad)
    sync.close()


def test_tensors_move_between_devices_by_the_names_of_these(P_world, device):
    x = shard({"H": -1}, torch.rand(1, 1, 7, 3))
    with pytest.raises(UnsupportedError, match=r"\) on cpu, .*\) on fake:0: move them to one device"):
        x + x.to(device)
    assert all(torch.equal(x.to(device).cpu().to_local(), x.to_local()) for x in (x, x * 2))
    if not torch.cuda.is_available():
        # Torch's own error: the function has a rule.
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            x.cuda()

"""The device made of Python is a device: exact, hidden, and as late as a device may be."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from tests.fake_device import Event, Race, Stream, counted, needs_fake_device, register

pytestmark = needs_fake_device


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2, 2),
        nn.BatchNorm2d(2),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ).double()


def test_a_step_on_the_device_is_a_step_on_the_host():
    # An engine that has begun before has no threads for the device, which is not needed here either.
    torch._C._set_multithreading_enabled(False)
    device, x = register(), torch.rand(2, 3, 8, 8, dtype=torch.float64)
    here, there = _model(), _model().to(device)
    for model, data in ((here, x), (there, x.to(device))):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    assert all(p.device == p.grad.device == device for p in there.parameters())
    for one, other in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other.cpu())


def test_the_host_cannot_look_at_the_bytes_of_a_tensor():
    x = torch.ones(3).to(register())
    for look in (x.numpy, lambda: np.asarray(x), lambda: np.from_dlpack(x)):
        with pytest.raises((TypeError, BufferError, RuntimeError)):
            look()
    with pytest.raises(RuntimeError, match="other numbers"):
        x.uniform_()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


def test_views_share_memory_and_copies_are_counted_for_each_thread():
    x = torch.zeros(4, 2).to(register())
    with counted() as found:
        x[1].add_(1)
        assert x.cpu()[1].tolist() == [1, 1]
        x[0].copy_(torch.ones(2))
        assert x.sum().item() == 4
    assert (found.ups, found.up_nbytes) == (1, 8)
    assert found.down_sizes == [32, 4]
    other = threading.Thread(target=x.cpu)
    other.start()
    other.join()
    assert found.downs == 2


def test_an_asynchronous_copy_is_there_once_it_was_waited_for():
    x, host = torch.arange(4.0).to(register()), torch.zeros(4)
    host.copy_(x, non_blocking=True)
    event = Event()
    event.record()
    assert host.tolist() != [0, 1, 2, 3]
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3]
    x.copy_(host, non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="before its copy"):
        torch.fake.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_does_not_wait_for_a_copy_of_another_stream_is_a_race(waits):
    device, beside, host = register(), Stream(), torch.arange(4.0)
    with torch.fake.stream(beside):
        x = torch.empty(4, device=device)
        x.copy_(host, non_blocking=True)
    if waits:
        torch.fake.current_stream().wait_stream(beside)
        assert (x * 2).cpu().tolist() == [0, 2, 4, 6]
        return
    with pytest.raises(Race, match="mul"):
        x * 2
    # Who waits on the host may use it as well.
    beside.synchronize()
    assert x.cpu().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_does_not_wait_for_a_kernel_of_another_stream_is_a_race(waits):
    x, beside, host = torch.arange(4.0).to(register()) + 1, Stream(), torch.zeros(4)
    if waits:
        beside.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(beside), nullcontext() if waits else pytest.raises(Race, match="copy"):
        host.copy_(x, non_blocking=True)
    if waits:
        # The copy still reads.
        with pytest.raises(Race, match="add"):
            x.add_(1)
        # An event from before the copy does not cover it.
        early = Event()
        early.synchronize()
        assert host.tolist() != [1, 2, 3, 4]
        beside.record_event().synchronize()
        assert host.tolist() == [1, 2, 3, 4]
        x.add_(1)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_freed_while_another_stream_uses_it_is_a_race(recorded):
    device, beside, compute = register(), Stream(), torch.fake.current_stream()
    with torch.fake.stream(beside):
        x = torch.ones(4, device=device)
    compute.wait_stream(beside)
    y = x + 1
    if recorded:
        x.record_stream(compute)
    del x
    with nullcontext() if recorded else pytest.raises(Race, match="freed"):
        y.cpu()

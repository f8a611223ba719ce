"""Batches on a device are those of the host, bit for bit, and are there before the loop asks for them."""

from __future__ import annotations

import threading

import pytest
import torch

from distdl_rma import ConfigurationError, ShardLoader, distribute
from distdl_rma.layers import staging
from tests.fake_device import NAME, counted, needs_fake_device
from tests.jobs.data.test_loader import NUMBERS, made, order

pytestmark = [pytest.mark.mpi, needs_fake_device]


def bits(batch):
    return [getattr(x, "_local", x).cpu() for x in batch]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("late", [True, False])
def test_batches_on_a_device_are_those_of_the_host(P_world, device, monkeypatch, prefetch, late):
    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME} if late else set())
    options = {"batch": 3, "shuffle": True, "prefetch": prefetch}
    here, there = (ShardLoader(made(), **options, device=place) for place in ("cpu", device))
    for one, other in zip(here, there, strict=True):
        assert {x.device.type for x in one} == {"cpu"}
        assert {x.device for x in other} == {device}
        assert all(map(torch.equal, bits(one), bits(other)))
    assert there.state_dict() == here.state_dict()


def test_the_thread_that_reads_copies_the_next_batch_while_the_loop_has_this_one(
    P_world, device, monkeypatch
):
    threads, copied = set(), threading.Event()

    class Noted(staging.Ascent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            threads.add(threading.current_thread().name)
            copied.set()

    monkeypatch.setattr("distdl_rma.jobs.data.loader.Ascent", Noted)
    batches = iter(ShardLoader(made(), 2, prefetch=1, device=device))
    next(batches)
    copied.clear()
    with counted() as moved:
        for _ in batches:
            # That of the next batch, but for the last one.
            copied.wait(5)
    assert moved.ups == 0
    assert {name.split("_")[0] for name in threads} == {"ShardLoader"}


def test_a_distributed_model_takes_the_batches(P_world, device):
    model = distribute(torch.nn.Conv2d(2, 1, 3, padding=1).to(device), {"H": -1})
    for image, _, number in ShardLoader(made(), 5, device=device):
        y = model(image)
        assert y.device == number.device == device
    model.distributed.close()


def test_a_device_that_one_rank_lacks_is_refused_on_all(P_world, comm, device):
    last = comm.rank == comm.size - 1
    with pytest.raises(ConfigurationError, match="no device cuda:7 on this rank"):
        ShardLoader(made(), device="cuda:7" if last else device)
    with pytest.raises(ConfigurationError, match=f"type of the device: {NAME} on rank 0, but cpu on rank"):
        ShardLoader(made(), device="cpu" if last else device)
    assert order(ShardLoader(made(), 5, device=device)) == NUMBERS


def test_batches_without_memory_are_refused(P_world):
    with pytest.raises(ConfigurationError, match="a batch on the device meta would have no elements"):
        ShardLoader(made(), device="meta")

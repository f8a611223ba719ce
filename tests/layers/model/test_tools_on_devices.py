"""compare() and report() of models on a device: exact, refused by both names, and copies to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ConfigurationError, compare, distribute, report
from tests.fake_device import NAME, counted, needs_fake_device
from tests.layers.test_devices import batch, on, unet

pytestmark = [
    pytest.mark.mpi,
    needs_fake_device,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


@pytest.mark.parametrize("there", [True, False])
def test_a_model_on_a_device_equals_the_same_alone_there_or_on_the_host(P_world, device, there):
    torch.manual_seed(1)
    # A device has another generator than that of the host, by which split tensors draw.
    alone = unet(2, "batch", nn.Dropout2d(0.0 if there else 0.3))
    split = distribute(on(device, alone), {"H": -1})
    alone = alone.to(device) if there else alone
    x, wanted = (each.to(device) for each in batch(2, 0))
    before = {key: value.clone() for key, value in split.state_dict().items()}
    of_host, of_device = torch.get_rng_state(), torch.fake.get_rng_state()
    found = compare(alone, split, x, wanted, F.mse_loss)
    assert found.equal, str(found)
    assert {"output", "loss", "input gradient", "gradient", "buffer"} == {x.what for x in found.differences}
    assert all(p.grad is None for model in (alone, split) for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in split.state_dict().items())
    assert torch.equal(torch.get_rng_state(), of_host)
    assert torch.equal(torch.fake.get_rng_state(), of_device)
    split.distributed.close()


def test_a_comparison_on_two_devices_is_refused_with_both_names(P_world, comm, device):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1))
    here, there = distribute(on("cpu", model), {"H": -1}), distribute(on(device, model), {"H": -1})
    x = torch.rand(1, 1, 12, 4)
    last = comm.rank == comm.size - 1
    with pytest.raises(ConfigurationError, match=rf"alone is on {NAME}:0, but the distributed model on cpu"):
        compare(on(device if last else "cpu", model), here, x)
    with pytest.raises(ConfigurationError, match=rf"input or target is on cpu, but .* on {NAME}:0"):
        compare(model, there, x if last else x.to(device))
    half = on("cpu", model)
    half[1].to(device)
    with pytest.raises(ConfigurationError, match=rf"'1.weight' is on {NAME}:0, but others are on cpu"):
        compare(half if last else model, there, x.to(device))
    for split, where in ((here, "cpu"), (there, device)):
        assert compare(model, split, x.to(where)).equal
        split.distributed.close()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_report_has_the_bytes_that_the_device_has_copied(P_world, device, norm):
    torch.manual_seed(1)
    split = distribute(on(device, unet(2, norm, nn.Dropout(0.3))), {"H": -1})
    for step in range(3):
        x, wanted = (each.to(device) for each in batch(2, step))
        with counted() as moved, report(split) as seen:
            F.mse_loss(split(x), wanted).backward()
        assert (seen.nbytes_down, seen.nbytes_up) == (moved.down_nbytes, moved.up_nbytes)
    calls = {call.module: call for call in seen.calls}
    assert calls["down.2"].nbytes_down == calls["down.2"].nbytes_up == 0 < calls["down.0"].nbytes_up
    assert 0 < calls["down.0"].copied <= seen.copied < seen.seconds
    assert "between device and host: " in str(seen)
    assert seen.table().splitlines()[0].endswith("copied")
    split.distributed.close()


def test_a_report_of_a_model_on_the_host_says_nothing_of_devices(P_world):
    split = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    with report(split) as seen:
        split(torch.rand(1, 1, 12, 4)).sum().backward()
    assert seen.nbytes_down == seen.nbytes_up == seen.copied == 0
    assert "device and host" not in str(seen) and "copied" not in seen.table()
    split.distributed.close()

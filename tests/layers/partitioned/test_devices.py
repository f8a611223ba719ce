"""Layers with explicit partitions on a device: the numbers of torch's layers on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distdl_rma import (
    DistributedGradScaler,
    GradientSync,
    ShapeError,
    UnsupportedError,
    distribute,
    gather_state_dict,
    layers,
    shard,
    zero_volume_tensor,
)
from distdl_rma.layers import (
    DistributedBatchNorm2d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedMSELoss,
    Repartition,
    staging,
)
from tests.fake_device import NAME, counted, needs_fake_device
from tests.layers.partitioned.every_layer import EVERY_LAYER, first, outcome
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.sequential import agree
from tests.layers.partitioned.twins import Twins

pytestmark = [
    pytest.mark.mpi,
    needs_fake_device,
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    # Of torch's own kernels on a device made of Python.
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


# Losses of split classes compare their indices on the host.
@pytest.mark.parametrize("name", [name for name in EVERY_LAYER if "split classes" not in name])
def test_every_layer_gives_on_a_device_what_it_gives_on_the_host(P_world, device, name):
    layer, inputs = EVERY_LAYER[name](P_world)
    there = copy.deepcopy(layer).to(device)
    expected, found = outcome(layer, inputs), outcome(there, [x.to(device) for x in inputs])
    assert all(each is None or each.device == device for each in found)
    torch.testing.assert_close([each if each is None else each.cpu() for each in found], expected)


# Where weight, bias and input of a wrong rank are, and what all ranks say.
WRONG = [
    ("there", "there", "here", f"is on cpu, but the layer's parameters are on {NAME}:0"),
    ("here", "here", "there", f"is on {NAME}:0, but the layer's parameters are on cpu"),
    ("there", "here", "there", f"the parameters are on different devices, {NAME}:0 and cpu"),
    ("here", "here", "here", rf"on {NAME} but rank \d+ one on cpu|on cpu but rank \d+ one on {NAME}"),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("form", ["conv", "root", "general", "instance norm", "AllGather"])
def test_a_rank_on_another_device_is_refused_by_all_with_both_names(P_world, comm, device, form):
    form = "LinearAllGather" if form == "AllGather" else form
    twins, devices = Twins(P_world, form), {"here": torch.device("cpu"), "there": device}
    layer, x = twins.layer.to(device), twins.into(twins.draw())
    expected = layer(x.to(device)).detach()
    for culprits in ([0], [comm.size - 1], range(comm.size)):
        for *places, words in WRONG:
            weight, bias, its = (devices[at if comm.rank in culprits else "there"] for at in places)
            if {*places} == {"here"} and len(culprits) == comm.size:
                continue
            layer.to(weight).bias = nn.Parameter(layer.bias.detach().to(bias))
            same_error(comm, lambda its=its: layer(x.to(its)), ShapeError, words)
            layer.to(device)
            agree(layer(x.to(device)).detach().cpu(), expected.cpu())


def test_tensors_without_elements_are_on_the_device_too(P_world, comm, device):
    rows = P_world.create_cartesian_topology_partition((P_world.size, 1))
    scatter, whole = Repartition(first(P_world), rows), torch.arange(15.0).view(5, 3)
    mine = whole.to(device) if comm.rank == 0 else zero_volume_tensor(device=device)
    assert torch.equal(scatter(mine).cpu(), shard(rows, whole).to_local())
    if comm.size > 1:
        words = rf"rank 0 passes a tensor on {NAME} but rank 1 one on cpu: .* zero_volume_tensor\(device="
        same_error(comm, lambda: scatter(mine if comm.rank == 0 else mine.cpu()), ShapeError, words)
    assert torch.equal(scatter(mine.cpu()), shard(rows, whole).to_local())


def test_an_idle_rank_may_pass_nothing_from_the_host(P_world, comm, device):
    some = first(P_world, 3)
    layer = DistributedConv1d(some, 1, 2, 3).to(device)
    x = torch.rand(1, 1, 5).to(device) if some.active else zero_volume_tensor(1)
    y = layer(x)
    assert y.device == device
    y.sum().backward()
    assert layer.weight.grad.device == device
    assert len(set(comm.allgather(layer.weight.grad.sum().item()))) == 1


def test_training_of_layers_with_a_sync_equals_that_of_torch(P_world, comm, device):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    P_y = P_world.create_cartesian_topology_partition((P_world.size, 1, 1, 1))
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    torch.manual_seed(3)
    split = nn.Sequential(
        DistributedConv2d(P_x, 2, 4, 3, padding=1, get_sizeof_gradients=lambda: 4 * (2 * 4 * 9 + 4)),
        DistributedBatchNorm2d(P_x, 4),
        nn.ReLU(),
        Repartition(P_x, P_y),
        DistributedConv2d(P_y, 4, 2, 1, placement="root"),
    )
    split.to(device)
    split[0].connect((4, 2, 7, 5))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (alone, split)]
    loss = DistributedMSELoss(P_y)
    with GradientSync(split, P_world):
        for _ in range(3):
            x, wanted = torch.rand(4, 2, 7, 5), torch.rand(4, 2, 7, 5)
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(alone(x), wanted).backward()
            mine, target = (shard(P, each).to_local().to(device) for P, each in ((P_x, x), (P_y, wanted)))
            loss(split(mine), target).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert {p.device for p in split.parameters()} == {device}
    for key, value in gather_state_dict(split).items():
        torch.testing.assert_close(value.cpu(), alone.state_dict()[{"4": "3"}.get(key[0], key[0]) + key[1:]])


def test_a_distributed_model_may_contain_such_layers_on_its_device(P_world, device):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    torch.manual_seed(3)
    here = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), DistributedConv2d(P_x, 2, 1, 3, padding=1))
    there = copy.deepcopy(here).to(device)
    x, found = torch.rand(2, 1, 9, 4), []
    for model, where in ((here, torch.device("cpu")), (there, device)):
        split = distribute(model, P_x)
        y = split(x.to(where))
        y.square().mean().backward()
        assert y.device == where
        found.append([y.full_tensor().cpu(), *(p.grad.cpu() for p in model.parameters())])
        split.distributed.close()
    torch.testing.assert_close(*found)


def test_a_convolution_sends_its_edges_down_and_nothing_else(P_world, comm, device):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    layer = DistributedConv2d(P_x, 2, 3, 3, padding=1).to(device)
    x = torch.rand(1, 2, 4, 5).to(device).requires_grad_()
    for _ in range(3):
        with counted() as moved:
            layer(x).sum().backward()
    neighbours = (comm.rank > 0) + (comm.rank < comm.size - 1)
    # Two channels of five elements, forward and back; then the gradients, as one copy.
    gradients = sum(p.nbytes for p in layer.parameters()) * (comm.size > 1)
    assert moved.down_nbytes == 4 * neighbours * 2 * 5 * 2 + gradients
    assert moved.downs <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buckets_of_short_types_are_summed_once_rounded(P_world, comm, device, dtype):
    model = nn.Linear(3, 2).to(dtype).to(device)
    sync = GradientSync(model, P_world)
    parts = torch.rand(comm.size, 5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    for _ in range(2):
        model.zero_grad()
        model(parts[comm.rank].to(device)).sum().backward()
    # Gradients of the ranks, each in the short type; their sum is rounded once.
    wanted = torch.stack([part.float().sum(0).to(dtype).float() for part in parts]).sum(0).to(dtype)
    assert model.weight.grad.device == device
    assert torch.equal(model.weight.grad.cpu(), wanted.expand(2, 3))
    sync.close()


@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
def test_gradients_are_clipped_on_the_device_with_one_copy_down(P_world, comm, device, order):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    alone = copy.deepcopy(model)
    sync = GradientSync(model.to(device), P_world)
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
    model(x.to(device)).sum().div(comm.size).backward()
    alone(x).sum().backward()
    with counted() as moved:
        norm = sync.clip_grad_norm_(0.1, norm_type=order)
    assert moved.downs <= 1
    torch.testing.assert_close(norm.float().cpu(), nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order))
    found, expected = ([p.grad.cpu() for p in net.parameters()] for net in (model, alone))
    torch.testing.assert_close(found, expected)
    sync.close()


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_skips_a_step_on_all_ranks_with_one_copy_down(P_world, comm, device, overflows):
    # Its model has no split tensors, for which the library does this.
    staging.backward_in_this_thread()
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    model.to(device)
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), 0.5),
        DistributedGradScaler(P_world, init_scale=8.0),
    )
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 2).to(device)).sum()).backward()
        if overflows and comm.rank == comm.size - 1 and step == 0:
            model.weight.grad.fill_(float("inf"))
        with counted() as moved:
            scaler.step(optimizer)
        assert moved.downs <= 1
        scaler.update()
    assert scaler.get_scale() == (4.0 if overflows else 8.0)
    assert model.weight.tolist() == [[1 - 1.5 * (1 if overflows else 2)] * 2]


@pytest.mark.parametrize("form", ["conv", "root", "transposed", "LinearAllGather", "batch norm", "bilinear"])
def test_layers_compute_under_autocast_of_the_device(P_world, device, monkeypatch, form):
    monkeypatch.setattr(staging, "AUTOCASTING", [*staging.AUTOCASTING, NAME])
    twins, found = Twins(P_world, form, torch.float32), []
    x = twins.draw()
    for kind, place in (("cpu", "cpu"), (NAME, device)):
        twins.layer.to(place).zero_grad()
        mine = twins.into(x).to(place).requires_grad_()
        with torch.autocast(kind, torch.bfloat16):
            y = twins.layer(mine)
        y.float().square().sum().backward()
        found.append([y.detach().cpu(), mine.grad.cpu(), *(p.grad.cpu() for p in twins.layer.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("form", "cpu", "gpu"),
    [
        ("group norm", torch.bfloat16, torch.float32),
        ("layer norm", torch.bfloat16, torch.float32),
        ("instance norm", torch.bfloat16, torch.bfloat16),
        ("bilinear", torch.bfloat16, torch.float32),
        ("trilinear", torch.bfloat16, torch.float32),
        ("AvgPool2d", torch.bfloat16, torch.bfloat16),
        ("ReflectionPad2d", torch.float32, torch.bfloat16),
    ],
)
def test_layers_of_short_types_are_converted_as_torch_does_there(
    P_world, device, monkeypatch, form, cpu, gpu
):
    monkeypatch.setattr(staging, "AUTOCASTING", [*staging.AUTOCASTING, NAME])
    twins = Twins(P_world, form, torch.float32)
    x = twins.draw().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = twins.layer(twins.into(x)), twins.twin(x)
    assert y.dtype == expected.dtype == cpu
    torch.testing.assert_close(y, twins.out(expected), atol=0.1, rtol=0.02)
    with torch.autocast(NAME, torch.bfloat16):
        assert twins.layer.to(device)(twins.into(x).to(device)).dtype == gpu


@pytest.mark.parametrize("name", ["Conv2d", "BatchNorm2d"])
def test_a_device_is_refused_before_torch_draws_on_it(P_world, device, name):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    arguments = (P_x, 1, 1, 3) if name == "Conv2d" else (P_x, 1)
    with pytest.raises(UnsupportedError, match="build the layer on the CPU"):
        getattr(layers, f"Distributed{name}")(*arguments, device=device)

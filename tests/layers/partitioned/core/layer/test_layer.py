"""Messages, recordings and profiles call layers by their paths in the model; ranks match them by others."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from distdl_rma import ArgumentError, ConfigurationError, GradientSync, Machine, ShapeError, shard
from distdl_rma.layers import DistributedAvgPool2d, DistributedConv2d, DistributedInstanceNorm2d, partitioned
from tests.layers.partitioned.every_layer import local, rows

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


class Down(nn.Module):
    def __init__(self, P_x):
        super().__init__()
        self.conv = nn.Sequential(DistributedConv2d(P_x, 4, 4, 3, padding=1), nn.ReLU())
        self.norm = DistributedInstanceNorm2d(P_x, 4, name="the norm")

    def forward(self, x):
        return self.norm(self.conv(x))


class Net(nn.Module):
    def __init__(self, P_x):
        super().__init__()
        self.down2 = Down(P_x)
        self.pool = DistributedAvgPool2d(P_x, 2)

    def forward(self, x):
        return self.pool(self.down2(x))


def wrapped(model, rank):
    """Not the same on all ranks."""
    return nn.Sequential(model) if rank else model


def test_labels_are_paths_unless_a_name_is_given(P_world):
    net = Net(rows(P_world))
    assert [net.down2.conv[0].label, net.down2.norm.label, net.pool.label] == [
        "down2.conv.0",
        "the norm",
        "pool",
    ]
    alone = DistributedAvgPool2d(rows(P_world), 2)
    assert alone.label == alone.name and alone.name.startswith("DistributedAvgPool2d#")
    with pytest.raises(ShapeError, match=r"^'DistributedAvgPool2d#\d+': "):
        alone("no tensor")


CHANGES = {
    "DistributedConv2d(P_x, 4, 4, 3)": ("stride", (2, 2)),
    "DistributedConvTranspose2d(P_x, 4, 4, 3)": ("output_padding", (1, 1)),
    "DistributedAvgPool2d(P_x, 2)": ("ceil_mode", True),
    "DistributedMaxPool2d(P_x, 2)": ("return_indices", True),
    "DistributedUpsample(P_x, 2)": ("size", (3, 3)),
    "DistributedGroupNorm(P_x, 2, 4)": ("num_groups", 1),
    "DistributedEmbedding(P_x, 4, 4)": ("padding_idx", 1),
    "HaloExchange(P_x, 1)": ("width", 2),
}


@pytest.mark.parametrize("made", CHANGES)
def test_arguments_that_operations_are_derived_from_cannot_change(P_world, made):
    name, value = CHANGES[made]
    layer = eval(made, vars(partitioned) | {"P_x": rows(P_world)})
    old = getattr(layer, name)
    with pytest.raises(ArgumentError, match=rf"its {name} is .* and cannot become .*: build a new layer"):
        setattr(layer, name, value)
    setattr(layer, name, old)
    assert getattr(layer, name) == old


def test_ranks_may_wrap_their_models_differently(P_world, comm):
    net = Net(rows(P_world))
    model = wrapped(net, comm.rank)
    for _ in range(2):
        model(local().requires_grad_()).sum().backward()
    label = "0.down2.conv.0" if comm.rank else "down2.conv.0"
    assert net.down2.conv[0].label == label
    with pytest.raises(ShapeError, match=f"^'{label}': .*channels"):
        model(torch.rand(2, 3, 6, 5))
    with pytest.raises(ShapeError, match=f"^'{label.replace('down2.conv.0', 'pool')}': "):
        net.pool("no tensor")


def test_copies_are_told_from_what_they_were_made_from(P_world):
    net = Net(rows(P_world))
    first = copy.deepcopy(net)
    second = copy.deepcopy(first)
    assert first.down2.conv[0].label == "down2.conv.0 (copy 1)"
    assert second.down2.conv[0].label == "down2.conv.0 (copy 2)"
    assert first.down2.norm.label == "the norm (copy 1)"
    with pytest.raises(ShapeError, match=r"^'down2.conv.0 \(copy 2\)': "):
        second(torch.rand(2, 3, 6, 5))
    alone = nn.ModuleList([copy.deepcopy(net.pool)])
    assert alone[0].label == "0"
    names = {layer.name for model in (net, first, second) for layer in (model.pool, model.down2.conv[0])}
    assert len(names) == 6


def test_recordings_call_layers_by_their_paths(P_world):
    net = Net(rows(P_world))
    with Machine.of(P_world).record() as recording:
        net(local().requires_grad_()).sum().backward()
    names = {event.name for event in recording.events}
    assert "down2.conv.0" in names and not any("#" in name for name in names)
    assert any(event.name == "down2.conv.0" and event.backward for event in recording.events)


@pytest.mark.processes
def test_profiles_have_a_range_for_each_layer(P_world):
    net = Net(rows(P_world))
    net(local())
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        net(local())
    names = [event.key for event in profiled.key_averages()]
    assert {"down2.conv.0", "the norm", "pool"} <= set(names)


@pytest.mark.processes
def test_a_synchronisation_calls_parameters_by_their_paths(P_world, comm):
    net = Net(rows(P_world))
    model = wrapped(net, comm.rank)
    with GradientSync(model, P_world) as sync:
        prefix = "0." if comm.rank else ""
        named = [name for row in sync.describe() for name in row["parameters"]]
        wanted = [f"{prefix}down2.conv.0.weight", f"{prefix}down2.conv.0.bias"]
        assert named == (wanted if comm.size > 1 else [])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(local()).sum().backward()
        ranges = {event.key for event in profiled.key_averages() if event.key.startswith("GradientSync: ")}
        acts = ("start", "wait") if comm.size > 1 else ()
        assert ranges == {f"GradientSync: {act} gradients 0" for act in acts}
        with pytest.raises(ConfigurationError, match=f"'{prefix}down2.conv.0.weight' already belongs"):
            GradientSync(model, P_world)


@pytest.mark.parametrize("kind", ["pool", "convolution"])
def test_ranks_without_elements_recompute_with_the_others(P_world, comm, kind):
    # Two rows: the third of three ranks has none, and saves nothing of a pool.
    P_x = rows(P_world)
    before = DistributedConv2d(P_x, 2, 2, 3, padding=1)
    layer = DistributedAvgPool2d(P_x, 2) if kind == "pool" else DistributedConv2d(P_x, 2, 2, 3, padding=1)
    x = shard(P_x, torch.ones(1, 2, 2, 4)).to_local()
    gradients = []
    for act in (layer, lambda y: checkpoint(layer, y, use_reentrant=False)):
        before.zero_grad()
        act(before(x)).square().sum().backward()
        gradients.append(before.weight.grad)
    torch.testing.assert_close(*gradients)

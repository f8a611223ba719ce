"""What is known to be wrong with plain modules on shards is said, once."""

import warnings

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine
from distdl_rma.layers import DistributedConv2d, DistributedMSELoss, Repartition

pytestmark = pytest.mark.mpi


def spoken(act):
    """What is warned of in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


@pytest.mark.mpi(min_size=2)
def test_plain_modules_that_look_around_are_named_where_all_layers_split_the_image(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    P_n = P_world.create_cartesian_topology_partition((comm.size, 1, 1, 1))
    model = nn.Sequential(
        DistributedConv2d(P_x, 1, 2, 3, padding=1),
        nn.Conv2d(2, 2, 1),
        nn.PReLU(),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ZeroPad2d(1),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Upsample(scale_factor=2),
        nn.MaxPool2d(2),
        nn.MaxPool2d((2, 2), 2, dilation=(1, 2)),
        nn.AvgPool2d(3, stride=2),
        nn.AvgPool2d(2, padding=1),
        nn.LPPool2d(2, (2, 2), stride=(2, 1)),
        nn.Unfold(2, stride=2),
    )
    said = spoken(lambda: GradientSync(model, P_world).close())
    names = "'3' (Conv2d), '4' (BatchNorm2d), '5' (ZeroPad2d), '6' (AdaptiveAvgPool2d), '7' (Upsample)"
    names += ", '10' (MaxPool2d), '11' (AvgPool2d), '12' (AvgPool2d), '13' (LPPool2d)"
    assert len(said) == (1 if comm.rank == 0 else 0)
    assert all(words.startswith(f"GradientSync: {names}: plain modules see only the shard") for words in said)
    # Where samples are split, or the image is whole in some part, they may be right.
    right = nn.Sequential(DistributedConv2d(P_n, 1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1))
    part = nn.Sequential(model[0], Repartition(P_x, P_n), nn.Conv2d(2, 2, 3, padding=1))
    for each in (right, part, model[:3]):
        assert spoken(lambda each=each: GradientSync(each, P_world).close()) == []


@pytest.mark.mpi(min_size=2)
def test_generators_that_drifted_apart_while_parts_of_weights_were_filled_are_warned_of(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    root = DistributedConv2d(P_x, 1, 2, 3, weights="root", name="first")
    copied = DistributedConv2d(P_x, 1, 2, 3)
    for seeds, fills, warned in (("equal", True, True), ("equal", False, False), ("different", True, False)):
        torch.manual_seed(comm.rank if seeds == "different" else 0)
        if fills:
            nn.init.uniform_(root.weight)
        assert spoken(lambda: GradientSync(copied, P_world).close()) == []
        said = spoken(lambda: GradientSync(root, P_world).close())
        assert len(said) == (1 if warned and comm.rank == 0 else 0)
        assert all("weights of 'first' were filled" in words for words in said)
        root.apply(lambda module: nn.init.uniform_(module.weight))


@pytest.mark.mpi(min_size=2)
def test_a_functional_call_without_a_sync_is_warned_of_once_on_each_rank(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size, 1))
        model = nn.Sequential(DistributedConv2d(P_x, 1, 2, 3, padding=1), nn.PReLU()).double()
        loss_of, x = DistributedMSELoss(P_x), torch.rand(1, 1, 4, 4, dtype=torch.float64)
        zeros = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
        loss_of(model(x), zeros).backward()

        def call(requires_grad=True):
            own = {
                key: value.detach().clone().requires_grad_(requires_grad)
                for key, value in model.named_parameters()
            }
            y = torch.func.functional_call(model, own, x)
            if requires_grad:
                loss_of(y, zeros).backward()
                # What distributed layers have is right.
                torch.testing.assert_close(own["0.weight"].grad, model[0].weight.grad)

        assert spoken(lambda: call(requires_grad=False)) == []
        (said,) = spoken(call)
        assert "its parameters are replaced in this call, as torch.func.functional_call does" in said
        assert spoken(call) == []

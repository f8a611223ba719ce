"""Models initialised as one machine would have them, by functions that know nothing of ranks."""

import math

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, gather_state_dict, load_global_state_dict, shard, whole_parameters
from distdl_rma.layers import DistributedConv1d, DistributedLinear
from tests.layers.partitioned.twins import Twins

pytestmark = pytest.mark.mpi
DTYPE = {"dtype": torch.float64}


# Whose weights are cut, or on one rank; the last one is on some ranks only.
INITIALISED = ["conv", "root", "transposed general", "linear", "LinearReduceScatter", "embedding root"]
INITIALISED += ["batch norm of channels", "layer norm of a number", "linear"]


def twins(P_world):
    made = [Twins(P_world, form) for form in INITIALISED[:-1]]
    made.append(Twins(P_world, INITIALISED[-1], ranks=[P_world.size - 1]))
    return nn.ModuleList(each.layer for each in made), nn.ModuleList(each.twin for each in made)


def by_torch(name, **options):
    def fill(module):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() > 1:
            getattr(nn.init, name)(weight, **options)
        elif weight is not None:
            nn.init.normal_(weight, 1, 0.02)

    return fill


def by_hand(module):
    if getattr(module, "weight", None) is not None and module.weight.dim() > 1:
        module.weight.data.normal_(0, math.sqrt(2 / math.prod(module.weight.shape[1:])))
    elif getattr(module, "weight", None) is not None:
        module.weight = nn.Parameter(torch.rand(module.weight.shape, **DTYPE))
    if getattr(module, "running_mean", None) is not None:
        module.running_mean.uniform_()


FILLS = [
    by_torch("trunc_normal_", std=2.0),
    by_torch("kaiming_normal_", mode="fan_out"),
    by_torch("kaiming_uniform_", a=math.sqrt(5)),
    by_torch("xavier_uniform_"),
    by_torch("orthogonal_"),
    by_torch("uniform_"),
    by_hand,
]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("way", ["apply", "loop"])
def test_an_initialiser_gives_the_sequential_model_and_leaves_generators_equal(P_world, comm, fill, way):
    ours, theirs = twins(P_world)
    places = [parameter.data_ptr() for parameter in ours.parameters()]
    # The shapes of the parts, and the memory that they are in, stay.
    shapes = [parameter.shape for parameter in ours.parameters()]
    states = []
    for net in (theirs, ours):
        torch.manual_seed(5)
        if way == "apply":
            assert net.apply(fill) is net
        else:
            with whole_parameters(net):
                for module in net:
                    fill(module)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert [parameter.shape for parameter in ours.parameters()] == shapes
    if fill is not by_hand:
        assert [parameter.data_ptr() for parameter in ours.parameters()] == places
    expected = theirs.state_dict()
    for key, value in gather_state_dict(ours).items():
        if not key.endswith("bias"):
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def test_an_initialiser_that_fails_leaves_every_rank_its_part(P_world, comm):
    ours, _ = twins(P_world)
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    for act in (ours.apply, lambda fail: [fail(module) for module in ours]):
        with pytest.raises(ZeroDivisionError), whole_parameters(ours):
            act(lambda module: 1 / 0)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_weight_that_two_layers_share_is_initialised_under_a_sync_too(P_world, comm):
    P_b = P_world.create_cartesian_topology_partition((comm.size, 1))
    P_f = P_world.create_cartesian_topology_partition((1, comm.size))
    ours = nn.Sequential(*(DistributedLinear(P_f, P_f, P_b, 6, 6, bias=False, **DTYPE) for _ in range(2)))
    theirs = nn.Sequential(*(nn.Linear(6, 6, bias=False, **DTYPE) for _ in range(2)))
    x = torch.rand(2, 6, **DTYPE)
    for net in (ours, theirs):
        net[1].weight = net[0].weight
    with GradientSync(ours, P_world):
        for net in (ours, theirs):
            torch.manual_seed(1)
            net.apply(by_torch("normal_"))
        at = torch.arange(6).tensor_split(comm.size)[comm.rank]
        torch.testing.assert_close(ours(x[:, at]), theirs(x)[:, at])
        ours(x[:, at]).sum().backward()
        theirs(x).sum().backward()
        rows = torch.arange(6).tensor_split(comm.size)[comm.rank]
        torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad[rows])


def test_a_buffer_to_which_a_split_tensor_was_assigned_is_whole_in_the_state(P_world):
    class Mean(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv = conv
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            y = self.conv(x)
            self.mean = y.detach().mean((0, 1))
            return y

    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    torch.manual_seed(2)
    alone, x = Mean(nn.Conv1d(2, 3, 3, padding=1, **DTYPE)), torch.rand(1, 2, 8, **DTYPE)
    split = Mean(DistributedConv1d(P_x, 2, 3, 3, padding=1, **DTYPE))
    load_global_state_dict(split, alone.state_dict())
    alone(x), split(shard(P_x, x))
    state = gather_state_dict(split)
    assert type(state["mean"]) is torch.Tensor
    torch.testing.assert_close(state, dict(alone.state_dict()))

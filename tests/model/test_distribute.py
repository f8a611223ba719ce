"""A model that nobody rewrote: the same object, the same parameters, right gradients."""

import copy

import pytest
import torch
from torch import nn

from distdl_rma import (
    ConfigurationError,
    MismatchError,
    PartitionError,
    ProtocolError,
    UnsupportedError,
    distribute,
)
from distdl_rma.layers import DistributedInstanceNorm2d, Repartition
from distdl_rma.split import SplitTensor

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 13, 11)


def made():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    ).double()


@pytest.fixture
def x():
    return torch.randn(SHAPE, dtype=torch.float64)


@pytest.fixture
def pair(comm):
    alone = made()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    yield alone, split
    if hasattr(split, "distributed"):
        split.distributed.close()


def gradients_are_equal(split, alone):
    for (name, p), other in zip(split.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sizes(1, 2, 3, 4)
def test_the_model_stays_what_it_is(pair, x):
    alone, split = pair
    assert type(split) is nn.Sequential
    assert split.state_dict().keys() == alone.state_dict().keys()
    y = split(x)
    assert isinstance(y, SplitTensor)
    torch.testing.assert_close(y.full_tensor(), alone(x))
    split.distributed.close()
    assert type(split(x)) is torch.Tensor
    assert not hasattr(split, "distributed")


@pytest.mark.sizes(2, 3, 4)
def test_a_parameter_used_on_split_and_on_replicated_tensors(comm, x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            y = self.conv(x) * self.head.bias.view(1, 3, 1, 1)
            regular = self.head.weight.square().sum()
            return self.head(y.mean((2, 3))) * 2 + regular

    torch.manual_seed(1)
    alone = Both().double()
    split = distribute(copy.deepcopy(alone), {"W": -1})
    for model in (alone, split):
        model(x).square().sum().backward()
    gradients_are_equal(split, alone)
    split.distributed.close()


@pytest.mark.sizes(2, 3, 4)
def test_layers_of_this_library_stand_inside(P_world, x):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    P_y = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    torch.manual_seed(1)
    convs = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)]
    norm = DistributedInstanceNorm2d(P_x, 4, affine=True)
    split = nn.Sequential(convs[0], norm, nn.ReLU(), Repartition(P_x, P_y), convs[1]).double()
    alone = copy.deepcopy(
        nn.Sequential(convs[0], nn.InstanceNorm2d(4, affine=True), nn.ReLU(), convs[1])
    ).double()
    split = distribute(split, P_x)
    y, z = split(x), alone(x)
    torch.testing.assert_close(y.full_tensor(), z)
    y.square().mean().backward()
    z.square().mean().backward()
    gradients_are_equal(split, alone)
    split.distributed.close()


@pytest.mark.mpi(min_size=2)
def test_blocks_taken_for_whole_tensors_are_refused(pair, x, comm):
    with pytest.raises(MismatchError, match=r"same whole tensor.*SplitTensor\.from_local"):
        pair[1](x + comm.rank)


def test_what_cannot_be_distributed(pair, P_world):
    with pytest.raises(ConfigurationError, match="distributed already"):
        distribute(pair[1], {"H": -1})
    with pytest.raises(ConfigurationError, match="fallback"):
        distribute(made(), {"H": -1}, fallback="guess")
    with pytest.raises(ConfigurationError, match="'sum', 'mean' or 'none', got 'foo'"):
        distribute(made(), {"H": -1}, reduction="foo")
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn\.Module"):
        distribute(torch.relu if P_world.rank == 0 else made(), {"H": -1})
    if P_world.size > 1:
        one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
        with pytest.raises(PartitionError, match="all ranks of its machine"):
            distribute(made(), one)


@pytest.mark.mpi(min_size=2)
def test_moves_by_a_rule_can_be_forbidden(comm, x):
    class Other(nn.Module):
        def forward(self, x):
            return x + x.transpose(2, 3)

    split = distribute(nn.Sequential(Other()), {"W": -1}, fallback="error")
    with pytest.raises(UnsupportedError, match="fallback='error' forbids"):
        split(x[..., :11, :11])
    split.distributed.close()


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_says_otherwise_is_refused_by_all(comm):
    with pytest.raises(ConfigurationError, match="fallback is 'move' or 'error'"):
        distribute(made(), {"H": -1}, fallback="guess" if comm.rank == 1 else "move")
    with pytest.raises(ConfigurationError, match=r"grid: .* must be alike"):
        distribute(made(), {"H": -1} if comm.rank else {"W": -1})


def unfreezes(model):
    model[0].requires_grad_(True)


def replaces_a_module(model):
    torch.manual_seed(4)
    model[3] = nn.Sequential(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 2, 3)).double()


def replaces_a_parameter(model):
    model[3].bias = nn.Parameter(model[3].bias.detach() + 1)


def adds_a_parametrisation(model):
    torch.manual_seed(4)
    nn.utils.parametrizations.weight_norm(model[3])


def changes_the_type(model):
    model.float()


CHANGES = [unfreezes, replaces_a_module, replaces_a_parameter, adds_a_parametrisation, changes_the_type]


def steps(model, x, count=2):
    """Train; what comes out of the last step."""
    y = None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        y = model(x.to(model[0].weight.dtype))
        y.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return y


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_takes_part_from_the_next_call_on(comm, x, change, trained):
    alone = made()
    alone[0].requires_grad_(False)
    split = distribute(copy.deepcopy(alone), {"H": -1})
    for model in (alone, split):
        steps(model, x, 2 * trained)
        change(model)
        if trained:
            with torch.inference_mode():
                model.eval()(x.to(model[0].weight.dtype))
            model.train()
    torch.testing.assert_close(steps(split, x).full_tensor(), steps(alone, x))
    for p, other in zip(split.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)
    split.distributed.close()


def test_gradients_that_are_accumulated_stay_when_a_part_is_unfrozen(pair, x):
    alone, split = pair
    for model in pair:
        model[0].requires_grad_(False)
    split.distributed.close()
    distribute(split, {"H": -1})
    with split.distributed.no_sync():
        split(x).square().sum().backward()
        unfreezes(split)
        split(x).square().sum().backward()
    split(x).square().sum().backward()
    alone(x).square().sum().backward()
    unfreezes(alone)
    for _ in range(2):
        alone(x).square().sum().backward()
    gradients_are_equal(split, alone)


@pytest.mark.mpi(min_size=2)
def test_a_change_on_one_rank_alone_is_named_on_all(pair, x, comm):
    _, split = pair
    if comm.rank == 1:
        replaces_a_parameter(split)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"rank 1: .* its parameter '3.bias' was replaced or added"):
            split(x)
    if comm.rank != 1:
        replaces_a_parameter(split)
    split(x).square().sum().backward()


def test_means_know_of_what_changes_while_the_model_is_called(comm, x):
    model = distribute(made(), {"H": -1}, reduction="mean")

    def change(module, args, y):
        if not hasattr(module, "factor"):
            module.factor = nn.Parameter(torch.ones((), dtype=y.dtype))
        return y * module.factor

    model[3].register_forward_hook(change)
    with pytest.raises(
        ProtocolError, match=r"'3.factor' was replaced or added after a call of the model had"
    ):
        model(x).square().sum().backward()
    comm.Barrier()
    model.zero_grad()
    model(x).square().sum().backward()
    mean = model[3].factor.grad.clone()
    model.distributed.close()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(mean, model[3].factor.grad / comm.size)


def test_a_part_of_a_distributed_model_is_not_distributed_again(pair, x):
    _, split = pair
    with pytest.raises(
        ConfigurationError, match=r"'weight' already belongs to Sequential \(distributed model"
    ):
        distribute(split[3], {"H": -1})
    with pytest.raises(ConfigurationError, match=r"the part '0' .*; model\.0\.distributed\.close\(\) first"):
        distribute(nn.Sequential(split), {"H": -1})

"""A model that nobody rewrote: the same object, the same parameters, right gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import (
    ConfigurationError,
    MismatchError,
    PartitionError,
    UnsupportedError,
    distribute,
)
from distdl_rma.layers import DistributedInstanceNorm2d, Repartition
from distdl_rma.split import SplitTensor

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


@pytest.mark.mpi
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


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_accumulation_clipping_and_plain_steps(pair, x):
    alone, split = pair
    for model in pair:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            if model is split:
                with split.distributed.no_sync():
                    F.mse_loss(split(x), torch.zeros(2, 2, 11, 9, dtype=torch.float64)).backward()
            else:
                F.mse_loss(model(x), torch.zeros(2, 2, 11, 9, dtype=torch.float64)).backward()
            model(x * 2).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    gradients_are_equal(split, alone)


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_blocks_taken_for_whole_tensors_are_refused(pair, x, comm):
    with pytest.raises(MismatchError, match=r"whole one.*SplitTensor\.from_local"):
        pair[1](x + comm.rank)


@pytest.mark.mpi
def test_what_cannot_be_distributed(pair, P_world):
    with pytest.raises(ConfigurationError, match="distributed already"):
        distribute(pair[1], {"H": -1})
    with pytest.raises(ConfigurationError, match="fallback"):
        distribute(made(), {"H": -1}, fallback="guess")
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn\.Module"):
        distribute(torch.relu if P_world.rank == 0 else made(), {"H": -1})
    if P_world.size > 1:
        one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
        with pytest.raises(PartitionError, match="all ranks of its machine"):
            distribute(made(), one)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_moves_by_a_rule_can_be_forbidden(comm, x):
    class Other(nn.Module):
        def forward(self, x):
            return x + x.transpose(2, 3)

    split = distribute(nn.Sequential(Other()), {"W": -1}, fallback="error")
    with pytest.raises(UnsupportedError, match="fallback='error' forbids"):
        split(x[..., :11, :11])
    split.distributed.close()


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_what_one_rank_says_otherwise_is_refused_by_all(comm):
    with pytest.raises(ConfigurationError, match="fallback is 'move' or 'error'"):
        distribute(made(), {"H": -1}, fallback="guess" if comm.rank == 1 else "move")
    with pytest.raises(ConfigurationError, match=r"grid .* must be alike"):
        distribute(made(), {"H": -1} if comm.rank else {"W": -1})

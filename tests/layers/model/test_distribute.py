"""A model that nobody rewrote: the same object, the same parameters, right gradients."""

from typing import get_type_hints

import pytest
import torch
from torch import nn

from distdl_rma import (
    ArgumentError,
    ConfigurationError,
    GradientSync,
    MismatchError,
    PartitionError,
    ProtocolError,
    ShapeError,
    UnsupportedError,
    distribute,
    shard,
)
from distdl_rma.layers import DistributedInstanceNorm2d, Repartition
from distdl_rma.layers.split import SplitTensor

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
def pair(split_of):
    return (alone := made()), split_of(alone)


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
def test_layers_of_this_library_stand_inside(P_world, x, split_of):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    P_y = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    torch.manual_seed(1)
    convs, act = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)], nn.ReLU()
    norm = DistributedInstanceNorm2d(P_x, 4, affine=True)
    alone = nn.Sequential(convs[0], nn.InstanceNorm2d(4, affine=True), act, convs[1]).double()
    split = split_of(nn.Sequential(convs[0], norm, act, Repartition(P_x, P_y), convs[1]).double())
    y, z = split(x), alone(x)
    torch.testing.assert_close(y.full_tensor(), z)
    y.square().mean().backward()
    z.square().mean().backward()
    gradients_are_equal(split, alone)


@pytest.mark.mpi(min_size=2)
def test_blocks_taken_for_whole_tensors_are_refused(pair, x, comm):
    with pytest.raises(MismatchError, match=r"same whole tensor: load the same data.*distdl_rma\.shard"):
        pair[1](x + comm.rank)


def test_what_cannot_be_distributed(pair, P_world, comm):
    split, odd = pair[1], comm.rank == comm.size - 1
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    meta = nn.Conv2d(3, 2, 3, device="meta")
    part = r"the part '0' .*; model\.0\.distributed\.close\(\) first"
    for model, options, words in (
        (split, {}, "distributed already"),
        (split[3], {}, r"'weight' already belongs to Sequential \(distributed model"),
        (nn.Sequential(split), {}, part),
        (made(), {"fallback": "guess" if odd else "move"}, "fallback is 'move' or 'error'"),
        (made(), {"reduction": "foo"}, "'sum', 'mean' or 'none', got 'foo'"),
        (torch.relu if odd else made(), {}, r"takes a torch\.nn\.Module"),
        (made(), {"grid": {"H" if odd else "W": -1}}, r"grid: .* must be alike" if comm.size > 1 else ""),
        *((meta, {"grid": P_x, "reduction": kind}, "'weight' is on the device meta.*to_empty")
          for kind in ("sum", "none")),
    ):  # fmt: skip
        if words:
            with pytest.raises(ConfigurationError, match=words):
                distribute(model, **{"grid": {"H": -1}} | options)
    if comm.size > 1:
        one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
        with pytest.raises(PartitionError, match="all ranks of its machine"):
            distribute(made(), one)


def test_options_of_few_words_have_types_of_these_words():
    for function in (distribute, GradientSync.__init__):
        hints = get_type_hints(function)
        kinds = [hints[name] for name in ("reduction", "fallback") if name in hints]
        assert kinds and str not in kinds, function


@pytest.mark.mpi(min_size=2)
def test_grids_that_do_not_fit_the_ranks(comm):
    misfits = f"{comm.size + 1}x1", {"H": comm.size, "W": 2}, {"H": 5}
    for grid in (*misfits, "two by two", "2x-1", 4, {"Q": 2}, {"H": -1, "W": -1}):
        model = made()
        for call, x in ((shard, torch.randn(1, 1, 8, 8)), (lambda grid, x: distribute(x, grid), model)):
            with pytest.raises((PartitionError, ArgumentError), match="rank" if grid in misfits else None):
                call(grid, x)
        assert not hasattr(model, "distributed")


def test_inputs_beside_that_have_no_memory_of_their_elements(split_of):
    class Labelled(nn.Conv2d):
        def forward(self, x, _label):
            return super().forward(x)

    model = split_of(Labelled(1, 1, 3, padding=1))
    for beside in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        for _ in range(2):
            assert model(torch.ones(1, 1, 8, 8), beside).shape == (1, 1, 8, 8)


def test_a_batch_dimension_that_is_missing_and_a_numpy_array_are_named(P_world):
    x = torch.ones(3, 12, 5)
    for grid in (P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), {"H": -1}):
        model = distribute(nn.Conv2d(3, 2, 3), grid)
        with pytest.raises((ShapeError, ArgumentError), match=r"batch dimension .*missing\? x\.uns"):
            model(x)
        with pytest.raises(ArgumentError, match=r"torch\.from_numpy"):
            model(x.unsqueeze(0).numpy())
        assert model(x.unsqueeze(0)).shape == (1, 2, 10, 3)


@pytest.mark.mpi(min_size=2)
def test_moves_by_a_rule_can_be_forbidden(split_of, x):
    class Other(nn.Module):
        def forward(self, x):
            return x + x.transpose(2, 3)

    with pytest.raises(UnsupportedError, match="fallback='error' forbids"):
        split_of(nn.Sequential(Other()), "W", fallback="error")(x[..., :11, :11])


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


CHANGES = [unfreezes, replaces_a_module, replaces_a_parameter, adds_a_parametrisation, nn.Module.float]


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
def test_what_changes_between_calls_takes_part_from_the_next_call_on(split_of, x, change, trained):
    alone = made()
    alone[0].requires_grad_(False)
    split = split_of(alone)
    for model in (alone, split):
        steps(model, x, 2 * trained)
        change(model)
        if trained:
            with torch.inference_mode():
                model.eval()(x.to(model[0].weight.dtype))
            model.train()
    torch.testing.assert_close(steps(split, x).full_tensor(), steps(alone, x))
    gradients_are_equal(split, alone)


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

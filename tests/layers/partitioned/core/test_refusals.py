"""What one rank does wrong is refused on all ranks of a layer in the same words, and the layer goes on."""

import itertools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    GradientSync,
    Machine,
    ProtocolError,
    ShapeError,
    UnsupportedError,
    layers,
    zero_volume_tensor,
)
from tests.layers.partitioned.every_layer import EVERY_LAYER, first, grid, rows
from tests.layers.partitioned.every_layer import line as columns
from tests.layers.partitioned.same_error import FAULTS, same_error
from tests.layers.partitioned.twins import FORMS

pytestmark = pytest.mark.mpi(min_size=2)


# The layers that are no forms of twins, whose faults test_twins has. Of a copy, or the only term of a sum, a
# fault may be a tensor like any other: on grids on which the ranks have something in common.
FAMILIES = {form.kind.removesuffix("1d").removesuffix("2d") for form in FORMS.values()}
LAYERS = {
    name: make
    for name, make in EVERY_LAYER.items()
    if re.match(r"(Distributed)?(.*?)([123]d)?( |,|$)", name)[2] not in FAMILIES
} | {
    "Broadcast": lambda P: (layers.Broadcast(columns(P), columns(P)), (torch.ones(2, 3),)),
    "SumReduce": lambda P: (layers.SumReduce(columns(P), first(P)), (torch.ones(2, 3),)),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_fault_on_one_rank_is_refused_on_all_and_the_layer_goes_on(P_world, comm, kind):
    layer, good = LAYERS[kind](P_world)
    for (at, fault), place in itertools.product(enumerate(FAULTS.values()), range(len(good))):
        wrong = list(good)
        if comm.rank == at % comm.size:
            wrong[place] = fault(good[place])
        same_error(comm, lambda wrong=wrong: layer(*wrong))
        if at % 3 == 0:
            layer(*good)
    leaf = good[0].clone().requires_grad_(comm.rank == 0)
    y = layer(leaf, *good[1:])
    if y.requires_grad:
        y.sum().backward()


# A layer of each form of a call, and one that has its own loop around the call of the base.
CALLS = [
    "Broadcast",
    "DistributedNLLLoss of split classes",
    "DistributedConv1d replicated",
    "DistributedConv2d root",
]
CALLS += [f"Distributed{kind}" for kind in ("Concat", "MaxPool2d", "RMSNorm", "PoissonNLLLoss")]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", CALLS)
def test_arguments_that_a_call_does_not_take_are_refused_on_all_ranks(P_world, comm, kind):
    layer, good = EVERY_LAYER[kind](P_world)
    for at, (more, named) in enumerate([((1,), {}), ((), {"foo": 1}), (None, {})]):
        odd = comm.rank == at % comm.size
        wrong = good if not odd else () if more is None else (*good, *more)
        same_error(comm, lambda wrong=wrong, named=named if odd else {}: layer(*wrong, **named), ShapeError)
        layer(*good)


@pytest.mark.parametrize("kind", [layers.DistributedConv1d, layers.DistributedConvTranspose1d])
def test_weights_are_floating_point_numbers(P_world, comm, kind):
    layer, x = kind(rows(P_world, 1), 1, 1, 1), torch.ones(1, 1, 2)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(torch.complex64)
    same_error(comm, lambda: layer(x.to(torch.complex64)), UnsupportedError, "only floating point")


@pytest.mark.parametrize("kind", ["AllGather", "ReduceScatter"])
def test_features_of_a_linear_layer_are_those_of_the_weights(P_world, comm, kind):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer, x = getattr(layers, f"DistributedLinear{kind}")(P_x, 6, 5), torch.zeros(1, 7)
    match = r"global input \(\d, 7\) has 7 features, the layer takes 6"
    same_error(comm, lambda: layer(x), ShapeError, match)


OF_SEVERAL_PARAMETERS = ["DistributedConv1d replicated", "DistributedConvTranspose1d replicated"]
OF_SEVERAL_PARAMETERS += [
    f"Distributed{kind}"
    for kind in ("Linear", "LinearAllGather", "LinearReduceScatter", "BatchNorm1d", "GroupNorm", "LayerNorm")
]


@pytest.mark.parametrize("kind", OF_SEVERAL_PARAMETERS)
def test_inputs_and_parameters_of_one_layer_are_of_one_type(P_world, comm, kind):
    layer, good = EVERY_LAYER[kind](P_world)
    match = r"torch\.float64.* the parameters are torch\.float32"
    same_error(comm, lambda: layer(*(x.double() for x in good)), ShapeError, match)
    if comm.rank == 0:
        layer.bias.data = layer.bias.data.double()
    match = r"rank 0: .* different types, torch\.float32 and torch\.float64"
    same_error(comm, lambda: layer(*good), ShapeError, match)
    layer.float()(*good)


# Each rank has its own part of the weights of a linear layer.
@pytest.mark.parametrize(
    "kind", [*(kind for kind in OF_SEVERAL_PARAMETERS if "Linear" not in kind), "DistributedConv2d root"]
)
def test_parameters_that_one_rank_has_frozen_are_refused_on_all_and_the_layer_goes_on(P_world, comm, kind):
    layer, good = EVERY_LAYER[kind](P_world)
    for frozen in (layer.parameters(), [layer.bias], layer.parameters()):
        chosen = [*frozen] if comm.rank == 1 else []
        for parameter in chosen:
            parameter.requires_grad_(False)
        same_error(comm, lambda: layer(*good), ProtocolError, "freeze a parameter on all ranks or on none")
        with torch.no_grad():
            layer(*good)
        for parameter in chosen:
            parameter.requires_grad_(True)
        layer(*good).sum().backward()


def test_weights_of_an_embedding_are_of_one_type_on_all_ranks(P_world, comm):
    layer, x = layers.DistributedEmbedding(columns(P_world), 7, 3), torch.tensor([[0, 6]])
    if comm.rank == 1:
        layer.double()
    with pytest.raises(ShapeError, match="weights differ in type"):
        layer(x)
    layer.double()(x)


def test_what_is_no_index_or_out_of_range_is_refused_on_all_ranks(P_world, comm):
    layer = layers.DistributedEmbedding(columns(P_world), 7, 3)
    good = torch.tensor([[0, 6]])
    same_error(comm, lambda: layer(good.float()), ShapeError, r"indices are torch\.float32")
    for wrong, shown in ((7, 7), (-1, -1)):
        x = torch.tensor([[wrong, 2]]) if comm.rank == 1 else good
        text = same_error(comm, lambda x=x: layer(x), ShapeError)
        assert f"rank 1: index {shown} is out of range of 7 embeddings" in text
    assert layer(good).shape == (1, 2, 3)


def test_what_is_no_output_size_on_one_rank_is_refused_on_all(P_world, comm):
    layer, x = layers.DistributedConvTranspose1d(rows(P_world, 1), 1, 1, 2, stride=2), torch.ones(1, 1, 3)
    for wrong in (["many"], [1] * 9, [1 << 70]):
        size = wrong if comm.rank == 1 else None
        same_error(comm, lambda size=size: layer(x, output_size=size), ShapeError)
    layer(x)


GOOD = (2, 2, 4)
# Layers on the first rank alone, whose weights are on all, and a wrong input; GOOD is a good one.
KEEPERS = {
    "convolution": ("Conv1d", (2, 3, 3), {}, (2, 2, 1)),
    "circular": ("Conv1d", (2, 3, 3), {"padding": 1, "padding_mode": "circular"}, (2, 3, 4)),
    "transposed": ("ConvTranspose1d", (2, 3, 3), {}, (2, 1, 4)),
    "instance norm": ("InstanceNorm1d", (2,), {"affine": True}, (2, 2, 1)),
    "group norm": ("GroupNorm", (1, 2), {}, (2, 3, 4)),
    "batch norm": ("BatchNorm1d", (2,), {}, (2, 3, 4)),
}


def keeper(kind, P):
    """A layer of which all ranks but the first only keep the weights, and a wrong input."""
    name, arguments, options, bad = KEEPERS[kind]
    return getattr(layers, f"Distributed{name}")(first(P, 3), *arguments, **options), bad


def mine(comm, shape, fill=torch.ones):
    """Input of this rank: one of this shape on the first rank alone."""
    return fill(shape) if comm.rank == 0 else zero_volume_tensor(2)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("kind", KEEPERS)
def test_ranks_that_only_keep_weights_hear_what_is_refused(P_world, comm, kind, synchronised):
    layer, bad = keeper(kind, P_world)
    sync = GradientSync(layer, P_world) if synchronised else None
    wrong, good = mine(comm, bad), mine(comm, GOOD, lambda shape: torch.arange(16.0).view(shape))
    for _ in range(4):
        same_error(comm, lambda: layer(wrong).sum().backward(), ShapeError)
    for _ in range(3):
        layer.zero_grad()
        layer(good).square().sum().backward()
    same_error(comm, lambda: layer(None if comm.rank == 0 else good).sum().backward(), ShapeError)
    layer.zero_grad()
    layer(good).square().sum().backward()
    gradients = comm.allgather([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for one in gradients for a, b in zip(one, gradients[0], strict=True))
    assert gradients[0][0].any()
    if sync is not None:
        sync.close()
    # In whatever mode each rank is; batch norms must all be in one.
    for training in (False, comm.rank == 0, comm.rank != 0) if kind != "batch norm" else ():
        layer.train(training)
        same_error(comm, lambda: layer(wrong).sum().backward(), ShapeError)
        layer(good).sum().backward()


@pytest.mark.parametrize("kind", [kind for kind in KEEPERS if kind != "batch norm"])
def test_ranks_that_only_keep_weights_need_not_call_for_an_inference(P_world, comm, kind):
    layer, bad = keeper(kind, P_world)
    for _ in range(4 if comm.rank == 0 else 0):
        layer.train()
        with torch.no_grad():
            layer(torch.ones(GOOD))
        with torch.no_grad(), pytest.raises(ShapeError):
            layer(torch.ones(bad))
        with torch.inference_mode():
            layer.eval()(torch.ones(GOOD))
    layer.train()
    layer(mine(comm, GOOD)).sum().backward()


def test_a_call_that_no_backward_follows_sends_nothing_to_ranks_outside(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        layer = layers.DistributedConv1d(first(machine.partition(), 3), 2, 3, 3)
        before = vars(machine.segments.counters).copy()
        x = mine(comm, GOOD)
        with torch.no_grad():
            layer(x)
            layer.eval()(x)
        for parameter in layer.train().parameters():
            parameter.requires_grad_(False)
        layer(x)
        assert vars(machine.segments.counters) == before


def test_a_recomputation_tells_ranks_outside_nothing_twice(P_world, comm):
    layer = layers.DistributedConv1d(first(P_world, 3), 2, 3, 3)
    x = mine(comm, GOOD).requires_grad_()
    for again in (False, True):
        for _ in range(4):
            checkpoint(layer, x, use_reentrant=again).sum().backward()
    wrong = torch.ones(2, 3, 4) if comm.rank == 0 else x
    same_error(comm, lambda: checkpoint(layer, wrong, use_reentrant=False).sum().backward(), ShapeError)


def test_layers_of_replicas_hear_nothing_of_each_other(P_world, comm):
    # Every rank builds the layer for itself: it keeps the others' weights, and works all the same.
    own = grid(P_world, (1, 1, 1), [comm.rank])
    layer = layers.DistributedConv1d(own, 2, 3, 3)
    for _ in range(4):
        layer.zero_grad()
        layer(torch.ones(2, 2, 4)).sum().backward()
    assert len(set(comm.allgather(layer.weight.grad.sum().item()))) == 1
    with pytest.raises(ShapeError) if comm.rank == 1 else torch.no_grad():
        layer(torch.ones(2, 3 if comm.rank == 1 else 2, 4))

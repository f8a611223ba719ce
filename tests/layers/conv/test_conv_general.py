"""Convolutions in every form (channel, general, all padding modes) against the sequential layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import GradientSync, ShapeError, UnsupportedError, zero_volume_tensor
from distdl_rma.layers import (
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedConvTranspose2d,
)
from tests.fuzz.convolutions import check
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@over_seeds(100, each=10)
def test_random_convolutions_of_any_form_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def grid(P_world, shape, ranks=None):
    chosen = range(P_world.size) if ranks is None else ranks
    return P_world.create_partition_inclusive(chosen).create_cartesian_topology_partition(shape)


def halves(n):
    """Two factors of a number of ranks, the larger one last."""
    return (2, n // 2) if n % 2 == 0 else (1, n)


# Name, layer, partitions, arguments of torch.
FORMS = {
    "circular": (DistributedConv2d, lambda n: [(1, 1, n, 1)], {"padding_mode": "circular"}),
    "in-channels": (DistributedConv2d, lambda n: [(1, n, 1, 1)], {}),
    "channel": (DistributedConv2d, lambda n: [(1, n, 1, 1), (1, n, 1, 1), (*halves(n), 1, 1)], {}),
    "general": (DistributedConv2d, lambda n: [(1, n, 1, 1), (1, 1, 1, n), (1, *halves(n), 1)], {}),
    "grouped": (DistributedConv2d, lambda n: [(n, 1, 1, 1), (1, n, 1, 1), (n, 1, 1, 1)], {"groups": 2}),
    "transposed": (DistributedConvTranspose2d, lambda n: [(1, 1, n, 1)], {}),
    "transposed general": (
        DistributedConvTranspose2d,
        lambda n: [(1, n, 1, 1), (1, 1, 1, n), (*halves(n), 1, 1)],
        {},
    ),
}
SEQUENTIAL = {DistributedConv2d: nn.Conv2d, DistributedConvTranspose2d: nn.ConvTranspose2d}
# Four ranks make a grid of two by two.
SQUARE = pytest.mark.sizes(2, 3, 4)
each_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[SQUARE] if form in ("channel", "general") else []) for form in FORMS]
)


def twins(P_world, form, dtype=torch.float64, **options):
    """Distributed layer of a form, its input and output partition, and the sequential layer."""
    kind, shapes, extra = FORMS[form]
    grids = [grid(P_world, shape) for shape in shapes(P_world.size)]
    arguments = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1, "dtype": dtype} | extra
    torch.manual_seed(7)
    layer = kind(*grids, **arguments, **options)
    torch.manual_seed(7)
    return layer, grids[0], layer.P_y, SEQUENTIAL[kind](**arguments)


def compare_weights(layer, sequential):
    for key, parameter in sequential.named_parameters():
        store = layer.placed.placements[key].store
        if store.partition.active:
            agree(getattr(layer, key).grad, parameter.grad[store.slices()], key)


@each_form
def test_layer_used_twice_accumulation_and_retained_graphs(P_world, comm, form):
    layer, P_x, _, sequential = twins(P_world, form)
    a, b = torch.randn(2, 2, 4, 6, 5, dtype=torch.float64)
    for net, cut in ((layer, lambda t: shard(P_x, t)), (sequential, lambda t: t)):
        first, second = net(cut(a)), net(cut(b))
        loss = first.square().sum() + (second * first).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        net(cut(a)).sum().backward()
    compare_weights(layer, sequential)


@each_form
def test_in_place_activations_and_checkpointing(P_world, comm, form):
    layer, P_x, P_y, sequential = twins(P_world, form)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    # A doubling first: an activation in place needs a tensor that autograd made.
    steps = [lambda t: torch.relu_(t * 2), None, torch.relu_]
    local = shard(P_x, x).requires_grad_()
    x.requires_grad_()
    results = []
    for net, given in ((layer, local), (sequential, x)):
        y = torch.relu_(checkpoint(net, steps[0](given), use_reentrant=False))
        y.square().sum().backward()
        results.append(y)
    agree(results[0], shard(P_y, results[1]), "output")
    agree(local.grad, shard(P_x, x.grad), "input gradient")
    compare_weights(layer, sequential)


@each_form
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_shapes_may_change_from_call_to_call(P_world, comm, form, weights):
    layer, P_x, P_y, sequential = twins(P_world, form, weights=weights)
    for shape in ((2, 4, 6, 5), (1, 4, 6, 5), (2, 4, 1, 1), (3, 4, 9, 2), (2, 4, 6, 5)):
        x = torch.randn(shape, dtype=torch.float64)
        agree(layer(shard(P_x, x)), shard(P_y, sequential(x)), f"output of {shape}")
        with torch.no_grad():
            agree(layer(shard(P_x, x)), shard(P_y, sequential(x)), f"inference of {shape}")


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_types_are_exact_to_their_rounding(P_world, comm, form, dtype):
    layer, P_x, P_y, sequential = twins(P_world, form, dtype)
    x = torch.randn(2, 4, 6, 5, dtype=dtype)
    local = shard(P_x, x).requires_grad_()
    x.requires_grad_()
    y, out = sequential(x), layer(local)
    y.sum().backward()
    out.sum().backward()
    assert out.dtype == dtype
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, shard(P_y, y), **close)
    torch.testing.assert_close(local.grad, shard(P_x, x.grad), **close)


@pytest.mark.parametrize("form", ["feature", *FORMS])
def test_autocast_computes_in_the_shorter_type(P_world, comm, form, monkeypatch):
    monkeypatch.setitem(FORMS, "feature", (DistributedConv2d, lambda n: [(1, 1, n, 1)], {}))
    layer, P_x, P_y, sequential = twins(P_world, form, torch.float32)
    x = torch.randn(2, 4, 6, 5)
    local = shard(P_x, x).requires_grad_()
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, out = sequential(x), layer(local)
    assert out.dtype == y.dtype == torch.bfloat16
    torch.testing.assert_close(out, shard(P_y, y), rtol=0.03, atol=0.03)
    y.float().sum().backward()
    out.float().sum().backward()
    assert local.grad.dtype == torch.float32
    torch.testing.assert_close(local.grad, shard(P_x, x.grad), rtol=0.03, atol=0.03)
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters() if p.grad is not None)


@each_form
def test_one_rank_with_a_wrong_input_is_told_to_all_and_the_layer_stays_usable(P_world, comm, form):
    layer, P_x, _, _ = twins(P_world, form)
    good = shard(P_x, torch.randn(4, 4, 8, 5, dtype=torch.float64))
    before = layer(good)
    wrong = [torch.zeros(4, 5, 8, 5, 1), torch.zeros(good.shape), torch.zeros(0, 4, 9, 9).double()]
    for x in wrong:
        if comm.size == 1 and x.shape[0] == 0:
            continue
        with pytest.raises(ShapeError) as caught:
            layer(x if comm.rank == comm.size - 1 else good)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert str(caught.value).startswith(f"{layer.name!r}: ")
        assert torch.equal(layer(good), before)


@pytest.mark.mpi(min_size=2)
@each_form
def test_second_derivatives_are_refused(P_world, comm, form):
    layer, P_x, _, _ = twins(P_world, form)
    x = shard(P_x, torch.randn(4, 4, 8, 5, dtype=torch.float64)).requires_grad_()
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_padding_wider_than_the_input_is_refused_as_torch_does(P_world, comm, mode):
    P_x = grid(P_world, (1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 9, padding=4, padding_mode=mode)
    with pytest.raises(ShapeError, match=f"padding mode '{mode}' needs padding"):
        layer(shard(P_x, torch.zeros(1, 1, 3)))
    with pytest.raises(RuntimeError):
        nn.Conv1d(1, 1, 9, padding=4, padding_mode=mode)(torch.zeros(1, 1, 3))


def test_only_made_up_padding_and_cut_groups_do_not_overlap(P_world, comm):
    P_x = grid(P_world, (1, 1, comm.size))
    overlap = [
        DistributedConv1d(P_x, 1, 1, 3, padding=1),
        DistributedConv1d(P_x, P_x, P_x, 1, 1, 3, padding=1),
        DistributedConv1d(P_x, 1, 1, 3, padding_mode="circular"),
        DistributedConv1d(P_x, 1, 1, 3, P_W=grid(P_world, (1, comm.size, 1))),
        DistributedConv1d(P_x, 2, 2, 3, groups=2),
    ]
    gathered = [
        DistributedConv1d(P_x, 1, 1, 3, padding=1, padding_mode="circular"),
        DistributedConv1d(P_x, 2, 2, 3, groups=2, P_W=grid(P_world, (comm.size, 1, 1))),
    ]
    assert all(layer.options.overlaps for layer in overlap)
    assert not any(layer.options.overlaps for layer in gathered[: min(2, comm.size)])


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_overlapping_way_equals_the_gathered_one(P_world, comm, weights):
    P_x = grid(P_world, (1, 1, *halves(comm.size)))
    arguments = {"stride": (1, 2), "padding": (3, 1), "dilation": (2, 1), "groups": 2, "weights": weights}
    pair = []
    for overlaps in (True, False):
        torch.manual_seed(2)
        pair.append(DistributedConv2d(P_x, 4, 6, (3, 4), **arguments, dtype=torch.float64))
        pair[-1].options = replace(pair[-1].options, overlaps=overlaps)
    for shape in ((2, 4, 9, 11), (1, 4, 3, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        given = [shard(P_x, x).requires_grad_() for _ in pair]
        outputs = [layer(local) for layer, local in zip(pair, given, strict=True)]
        for layer, y in zip(pair, outputs, strict=True):
            layer.zero_grad()
            y.square().sum().backward()
        agree(*outputs, "output")
        agree(*(local.grad for local in given), "input gradient")
        for one, other in zip(*(layer.parameters() for layer in pair), strict=True):
            agree(one.grad, other.grad, "weight gradient")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_weights_are_kept_where_the_document_says(P_world, comm, weights):
    P_W = grid(P_world, (1, 2, 2), ranks=(3, 2, 1, 0))
    P = grid(P_world, (1, 1, 1), ranks=(1,))
    layer = DistributedConv1d(P, P, P_W, 6, 5, 3, weights=weights)
    # Ranks 3, 2 hold the first in-channel block, 1 and 0 the second; 3 and 1 come first in space.
    keeps = {"replicated": {0, 1, 2, 3}, "root": {1, 3}}[weights]
    assert layer.weight.shape == ((5, 3, 3) if comm.rank in keeps else (0,))
    assert layer.bias.shape == ((5,) if comm.rank in keeps & {2, 3} else (0,))
    peers = {3: [3, 2], 2: [3, 2], 1: [1, 0], 0: [1, 0]}[comm.rank]
    assert layer.get_ranks_synch_weights() == (peers if weights == "replicated" else [])


@each_form
def test_gradient_sync_takes_over_layers_of_any_form(P_world, comm, form):
    layer, P_x, _, sequential = twins(P_world, form)
    sync = GradientSync(nn.Sequential(layer), P_world)
    for _ in range(3):
        x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
        layer.zero_grad()
        sequential.zero_grad()
        sequential(x).square().sum().backward()
        layer(shard(P_x, x)).square().sum().backward()
        compare_weights(layer, sequential)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_of_no_partition_get_an_empty_clone(P_world, comm):
    P = grid(P_world, (1, 1, 1, 1, 1), ranks=(0,))
    layer = DistributedConv3d(P, P, P, 1, 1, 1, padding_mode="reflect", weights="root")
    x = torch.randn(2, 1, 2, 2, 2) if P.active else zero_volume_tensor(2)
    y = layer(x)
    assert y.shape == (x.shape if P.active else (2, 0))
    y.sum().backward()

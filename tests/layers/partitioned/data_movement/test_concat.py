"""Concatenation along channels of tensors with any distributions."""

import random
from functools import partial

import pytest
import torch

from distdl_rma import Machine, ShapeError, zero_volume_tensor
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedConcat
from tests.layers.partitioned.every_layer import grid
from tests.layers.partitioned.random_shards import cut, random_blocks, random_partition
from tests.layers.partitioned.sequential import agree, shard
from tests.layers.partitioned.twins import Cat, step_of_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def whole(shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def compare(layer, P_xs, P_y, xs, needs=None, blocks=None):
    """Output and gradients of one call against ``torch.cat`` of the global tensors."""
    if blocks is None:
        blocks = [Decomposition.balanced(P, x.shape) for P, x in zip(P_xs, xs, strict=True)]
    target = Decomposition.balanced(P_y, torch.cat(xs, 1).shape)
    # What does not move stays cut as it comes; else the batch, where the first input is.
    still = all(P_y == P for P in P_xs) and P_y.shape[1] == 1
    stays = range(xs[0].dim()) if still else [0] if P_y == P_xs[0] else []
    target = target.with_splits({d: blocks[0].splits[d] for d in stays if d != 1})
    parts = [partial(cut, each) for each in blocks]
    return step_of_both(layer, Cat(), xs, parts, partial(cut, target), needs=needs)


def test_random_shards_move_to_their_channels(P_world):
    for seed in range(30):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        space, count = rng.randint(0, 3), rng.randint(1, 4)
        rest = [rng.randint(0, 5), *(rng.randint(1, 5) for _ in range(space))]
        shapes = [(rest[0], rng.randint(0, 5), *rest[1:]) for _ in range(count)]
        P_xs = [random_partition(rng, P_world, space + 2) for _ in range(count)]
        P_y = random_partition(rng, P_world, space + 2)
        layer = DistributedConcat(P_xs, P_y)
        blocks = [random_blocks(rng, P, shape) for P, shape in zip(P_xs, shapes, strict=True)]
        # Of each rank its own.
        needs = [[rng.random() < 0.7 for _ in P_xs] for _ in P_world.ranks][P_world.me]
        for _ in range(2):
            compare(layer, P_xs, P_y, whole(shapes), needs, blocks)


def test_the_same_partition_without_a_channel_split_moves_nothing(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size, 1))
        layer = DistributedConcat([P_x, P_x])
        layer.connect([(2, 3, 5, 4), (2, 1, 5, 4)])
        for lengths in ((2, 3), (1, 1)):
            xs = whole([(lengths[0], 3, 5, 4), (lengths[0], 1, 5, 4)])
            y = compare(layer, [P_x, P_x], P_x, xs)
            assert y.data_ptr() != xs[0].data_ptr()
            assert layer.agreement.last.movements() == [None, None]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("moves", [False, True])
def test_what_does_not_fit_is_refused_on_all_ranks_and_the_layer_goes_on(P_world, comm, moves):
    n = comm.size
    P_a = grid(P_world, (1, 1, n))
    P_b = grid(P_world, (1, n, 1)) if moves else P_a
    layer = DistributedConcat([P_a, P_b], P_a, name="skip")
    good = whole([(2, 3, 6), (2, 4, 6)])
    wrong = {
        r"'skip': .* 2 .*; input 0 is \(2, 3, 6\) .*; input 1 is \(2, 4, 7\)": whole([(2, 3, 6), (2, 4, 7)]),
        r"input 0 is \(2, 3, 6\) .*; input 1 is \(1, 4, 6\)": whole([(2, 3, 6), (1, 4, 6)]),
        "is .* torch.float64; input 1 is .* torch.float8_e5m2": [good[0], good[1].to(torch.float8_e5m2)],
    }
    for message, xs in wrong.items():
        with pytest.raises(ShapeError, match=message):
            layer(shard(P_a, xs[0]), shard(P_b, xs[1]))
        compare(layer, [P_a, P_b], P_a, good)
    parts = [shard(P_a, good[0]), shard(P_b, good[1])]
    for given in ([], parts[:1], [*parts, parts[0]]):
        with pytest.raises(ShapeError, match=f"rank 0: takes 2 inputs, got {len(given)}"):
            layer(*given)
        with pytest.raises(ShapeError, match=f"rank 1: takes 2 inputs, got {len(given)}"):
            layer(*(given if comm.rank == 1 else parts))
        with pytest.raises(ShapeError, match=f"rank 1: takes 2 inputs, got {len(given)}"):
            layer.connect([(2, 3, 6)] * (len(given) if comm.rank == 1 else 2))
        compare(layer, [P_a, P_b], P_a, good)
    with pytest.raises(ShapeError, match=r"input 0: rank 0 passes torch\.float64 but rank 1 torch\.float32"):
        layer(parts[0].float() if comm.rank == 1 else parts[0], parts[1])
    compare(layer, [P_a, P_b], P_a, good)


@pytest.mark.mpi(min_size=3)
def test_idle_ranks_may_pass_any_tensor_without_elements(P_world):
    P_x, P_y = grid(P_world, (1, 1, 1), [0]), grid(P_world, (1, 2, 1), [1, 0])
    layer, xs = DistributedConcat([P_x, P_x], P_y), whole([(2, 3, 6), (2, 4, 6)])
    for empty in (zero_volume_tensor(), zero_volume_tensor(2), zero_volume_tensor(2, torch.float64)):
        y = layer(*(x if P_x.active else empty for x in xs))
        if P_y.active:
            agree(y, shard(P_y, torch.cat(xs, 1)))
        else:
            assert y.shape == (empty.shape if empty.dim() == 2 else (0,))
    assert layer.agreement is None or len(layer.agreement._cache._plans) == 1


MIXES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float64, torch.bfloat16),
    (torch.bool, torch.int32),
    (torch.int64, torch.float16),
    (torch.complex64, torch.float64),
]


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
@pytest.mark.parametrize("moves", [False, True])
def test_types_are_promoted_as_in_torch_and_gradients_come_back_in_their_own(P_world, comm, dtypes, moves):
    P_a, P_b = grid(P_world, (1, 1, comm.size)), grid(P_world, (1, 1, 1), [comm.size - 1])
    P_xs = [P_b if moves and at == 1 else P_a for at in range(len(dtypes))]
    layer = DistributedConcat(P_xs, P_a)
    xs = [(torch.arange(2 * 3 * 5) % 7).reshape(2, 3, 5).to(dtype) for dtype in dtypes]
    smooth = [x.is_floating_point() or x.is_complex() for x in xs]
    wholes = [x.clone().requires_grad_(able) for x, able in zip(xs, smooth, strict=True)]
    local = [
        (shard(P, x) if P.active else zero_volume_tensor()).requires_grad_(able and P.active)
        for P, x, able in zip(P_xs, xs, smooth, strict=True)
    ]
    y, expected = layer(*local), torch.cat(wholes, 1)
    assert y.dtype == expected.dtype and torch.equal(y, shard(P_a, expected.detach()))
    assert y.requires_grad == expected.requires_grad
    if not y.requires_grad:
        return
    gradient = (torch.arange(expected.numel()) % 5 / 3).reshape(expected.shape).to(expected.dtype)
    expected.backward(gradient)
    y.backward(shard(P_a, gradient))
    for x, P, full in zip(local, P_xs, wholes, strict=True):
        if x.requires_grad:
            assert x.grad.dtype == x.dtype and torch.equal(x.grad, shard(P, full.grad))

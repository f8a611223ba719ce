"""A random layer beside torch's: outputs, gradients and buffers of both, for random shards and needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distdl_rma import DistdlError, GradientSync, Partition, layers, zero_volume_tensor
from distdl_rma.geometry import Decomposition
from tests.layers.partitioned.random_shards import cut, random_blocks
from tests.layers.partitioned.sequential import agree
from tests.layers.partitioned.twins import compare_state

# Where layers compute; what is compared with torch's is on the host.
PLACE = torch.device("cpu")
# What torch raises for inputs that it does not take.
TORCH_REFUSALS = (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError)


@dataclass
class Pair:
    """A layer, torch's of the same arguments, and how the layer cuts its output."""

    layer: Any
    twin: Any
    P_x: Partition
    P_y: Partition
    # The decomposition of an output of this shape, from that of the input.
    target: Callable[[Decomposition, Sequence[int]], Decomposition]
    # Torch's layer, or a function with its values and the right gradient.
    reference: Callable[..., Any]
    # Whether the layer may refuse what torch computes, and compute what torch refuses.
    refuses_more: bool = False
    refuses_less: bool = False


def balanced(P_y: Partition, keeps_batch: bool) -> Callable[[Decomposition, Sequence[int]], Decomposition]:
    """Outputs are balanced over P_y, but for a batch that stays cut as in the input."""

    def target(blocks: Decomposition, shape: Sequence[int]) -> Decomposition:
        found = Decomposition.balanced(P_y, shape)
        return found.with_splits({0: blocks.splits[0]}) if keeps_batch else found

    return target


def twins(
    rng: random.Random, kind: str, grids: Sequence[Partition], arguments: dict, named: dict, torchs: str = ""
) -> tuple[Any, Any]:
    """A layer and torch's, of the same arguments and random numbers; some parameters do not learn."""
    seed = rng.randrange(1000)
    torch.manual_seed(seed)
    layer = getattr(layers, f"Distributed{kind}")(*grids, **arguments, **named)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    twin = getattr(nn, torchs or kind)(**arguments)
    assert torch.equal(after, torch.get_rng_state()), "the generator goes on as after torch's"
    assert layer.state_dict().keys() == twin.state_dict().keys()
    for key, parameter in twin.named_parameters():
        mine, store = getattr(layer, key), layer.placed.placements[key].store
        assert torch.equal(mine, cut(store, parameter)), f"initial {key}"
        if "Norm" in kind:
            nn.init.uniform_(parameter, 0.5, 1.5)
            mine.data.copy_(cut(store, parameter))
        if rng.random() < 0.15:
            mine.requires_grad_(False)
            parameter.requires_grad_(False)
    return layer, twin


def attempt(make: Callable[[], Any], refusals: Any) -> Any:
    """What a function returns, or None if it refuses."""
    try:
        return make()
    except refusals:
        return None


def run(
    P_world: Partition, rng: random.Random, pair: Pair, draw: Callable[[], Tensor], **options: Any
) -> None:
    """Some steps of both, each of one or two calls, now and then with a ``GradientSync``.

    ``draw`` gives a global input, ``options`` functions of an input that give further arguments of a call.
    """
    learns = any(parameter.requires_grad for parameter in pair.twin.parameters())
    pair.layer.to(PLACE)
    sync = GradientSync(pair.layer, P_world) if learns and rng.random() < 0.2 else None
    trains = isinstance(pair.twin, nn.modules.batchnorm._NormBase)
    try:
        for _ in range(rng.randint(1, 3)):
            for net in (pair.layer, pair.twin) if rng.random() < 0.5 else ():
                net.zero_grad()
            mode = not trains or rng.random() < 0.7
            pair.layer.train(mode), pair.twin.train(mode)
            step(rng, pair, [draw()] * rng.choice([1, 1, 2]), options)
            compare_state(pair.layer, pair.twin, lambda mine, *expected: agree(mine.cpu(), *expected))
    except BaseException as error:
        error.add_note(f"{pair.layer} of torch's {pair.twin}, from {pair.P_x} to {pair.P_y}")
        raise
    if sync is not None:
        sync.close()


def step(rng: random.Random, pair: Pair, xs: Sequence[Tensor], options: dict[str, Any]) -> None:
    """Calls of both on these inputs and one backward, as far as torch takes the inputs."""
    layer, P_x, P_y, me = pair.layer, pair.P_x, pair.P_y, pair.P_x.me
    everyone, learning = list(P_x.ranks), rng.random() < 0.9
    needing = (
        rng.choice([everyone, everyone, [], [rng.choice(everyone)]]) if xs[0].is_floating_point() else []
    )
    calls = []
    for given in xs:
        x = given.clone().requires_grad_(bool(needing))
        blocks, empty, strided = random_blocks(rng, P_x, x.shape), rng.choice([None, 3]), rng.random() < 0.2
        local = cut(blocks, x) if P_x.active else zero_volume_tensor(empty, x.dtype)
        local = local.transpose(0, -1).contiguous().transpose(0, -1) if strided and P_x.active else local
        local.requires_grad_(me in needing)
        more = {key: option(given) for key, option in options.items()}
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        with torch.set_grad_enabled(learning):
            expected = attempt(lambda x=x, more=more: pair.reference(x, **more), TORCH_REFUSALS)
            out = attempt(lambda local=local, more=more: layer(local.to(PLACE), **more), DistdlError)
            out = tree_map(lambda y: y if y is None else y.cpu(), out)
        if expected is None or out is None:
            assert expected is None or pair.refuses_more, "torch computes it"
            assert out is None or pair.refuses_less or me not in layer.agreeing(), "torch refuses it"
            if out is None:
                assert all(torch.equal(layer.state_dict()[key], value) for key, value in state.items())
            if getattr(pair.twin, "num_batches_tracked", None) is not None:
                # torch counts the batches that it refuses, too.
                pair.twin.num_batches_tracked.copy_(layer.num_batches_tracked)
            return
        if isinstance(expected, tuple):
            (expected, index), (out, places) = expected, out
            assert places.dtype == torch.int64
            mine = cut(pair.target(blocks, index.shape), index)
            assert not P_y.active or torch.equal(places, mine), "indices"
        target = pair.target(blocks, expected.shape)
        if P_y.active:
            agree(out, cut(target, expected), "output")
        assert P_y.active or not out.numel()
        calls.append((x, blocks, local, expected, out, target))
    trained = any(parameter.requires_grad for parameter in pair.twin.parameters())
    asked = learning and (trained or bool(needing))
    for *_, out, _ in calls:
        assert out.requires_grad == (asked if me in layer.agreeing() else learning)
    if not asked:
        return
    gradients = [torch.randn_like(expected) for *_, expected, _, _ in calls]
    # torch's backward of some layers refuses outputs without elements.
    pairs = [(y, g) for (*_, y, _, _), g in zip(calls, gradients, strict=True) if trained or y.numel()]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    mine = [
        cut(target, g) if P_y.active else torch.zeros_like(out)
        for (*_, out, target), g in zip(calls, gradients, strict=True)
    ]
    torch.autograd.backward([out for *_, out, _ in calls], mine)
    for x, blocks, local, *_ in calls:
        if me in needing:
            wanted = torch.zeros_like(x) if x.grad is None else x.grad
            agree(local.grad, cut(blocks, wanted), "input gradient")
        else:
            assert local.grad is None, "a gradient that nobody asked for"

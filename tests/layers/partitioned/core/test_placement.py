"""Which ranks keep which box of a parameter: simulated, all ranks in one process."""

import itertools

import pytest
import torch
from torch import nn

from distdl_rma import Partition
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.partitioned.core.placement import (
    Placement,
    as_whole,
    block_placement,
    cut,
    linear_values,
    part_of,
)

RANKS = (4, 1, 3, 0, 5, 2)


def stores(me):
    """Layouts of a 7 x 5 tensor on a grid of 3 x 2, seen by a rank: which grid dimensions cut which axis."""
    P = Partition(RANKS, (3, 2), me)
    whole = Decomposition.balanced(P, (7, 5))
    for axes in itertools.product((0, None), (1, None)):
        splits = [
            split if d in axes else Decomposition.replicated(P, (7, 5)).splits[d]
            for d, split in enumerate(whole.splits)
        ]
        yield Decomposition(P, tuple(splits), axes)


def everywhere(at):
    """One of the layouts as each rank sees it."""
    return {rank: list(stores(rank))[at] for rank in RANKS}


@pytest.mark.parametrize("at", range(4))
def test_copies_are_where_the_box_is_the_same(at):
    seen = everywhere(at)
    for rank, store in seen.items():
        same = [other for other in RANKS if store.box(other) == store.box(rank)]
        assert list(store.holders(store.partition.me)) == same


@pytest.mark.parametrize("at", range(4))
def test_one_copy_covers_the_tensor_exactly_once(at):
    counts = torch.zeros(7, 5)
    for store in everywhere(at).values():
        single = store.one_copy()
        if single.partition.active:
            counts[single.slices()] += 1
            assert single.partition.me == store.holders(store.partition.me)[0]
    assert torch.equal(counts, torch.ones(7, 5))


@pytest.mark.parametrize("at", range(4))
def test_parts_become_whole_for_a_while(at):
    values = torch.arange(35.0).reshape(7, 5)
    for store in everywhere(at).values():
        module = nn.Module()
        module.w = part_of(nn.Parameter(values, False), store)
        part, memory = module.w.detach().clone(), module.w.data_ptr()
        assert not module.w.requires_grad
        assert torch.equal(part, values[store.slices()])
        with as_whole(module, {"w": store}):
            assert module.w.shape == (7, 5)
            assert torch.equal(module.w[store.slices()], part)
            assert module.w.sum() == part.sum()
            module.w.data.copy_(-values)
        assert torch.equal(module.w, -part) and module.w.data_ptr() == memory


def test_ranks_outside_keep_nothing():
    for store in stores(77):
        assert cut(store, torch.ones(7, 5)).shape == (0,)
        module = nn.Module()
        module.w = part_of(nn.Parameter(torch.ones(7, 5)), store)
        with as_whole(module, {"w": store}):
            assert not module.w.any() and module.w.shape == (7, 5)
        assert module.w.shape == (0,)


def test_another_tensor_in_the_place_of_a_whole_one_is_cut_and_a_part_has_the_type_of_the_whole():
    store = next(stores(4))
    module = nn.Module()
    module.w = part_of(nn.Parameter(torch.ones(7, 5)), store)
    with as_whole(module, {"w": store}):
        module.w = nn.Parameter(torch.full((7, 5), 3.0))
    assert torch.equal(module.w, torch.full(store.box(4).shape, 3.0))
    with as_whole(module, {"w": store}):
        module.w.data = module.w.data.double()
    assert module.w.dtype == torch.float64 and module.w.shape == store.box(4).shape


def test_blocks_are_on_all_their_users_or_on_the_first():
    store = list(stores(4))[1]
    assert block_placement(store, "replicated") == Placement(store)
    rooted = block_placement(store, "root")
    assert rooted.use == store and rooted.store == store.one_copy()


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (1, 1), (300, 700), (0, 3), (3, 0), (70000, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_part_is_that_of_torchs_layer(inputs, outputs, dtype):
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="zero-element") if 0 in (inputs, outputs) else torch.no_grad():
        layer = nn.Linear(inputs, outputs, dtype=dtype)
    after = torch.get_rng_state()
    for me in range(5):
        torch.manual_seed(3)
        values = linear_values(inputs, outputs, True, dtype)
        P = Partition((0, 1, 2, 3), (2, 2), me)
        store = Decomposition.balanced(P, (outputs, inputs))
        part = values["weight"].cut(store)
        expected = layer.weight[store.slices()] if P.active else layer.weight.new_empty(0)
        assert torch.equal(part, expected) and part.dtype == dtype
        whole = Decomposition.replicated(Partition((me,), (1,), me), (outputs,))
        assert torch.equal(values["bias"].cut(whole), layer.bias)
        assert torch.equal(torch.get_rng_state(), after)
    assert linear_values(inputs, outputs, False, dtype)["bias"] is None

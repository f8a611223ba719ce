"""The movements of the documents: what each of them does, and which is whose transpose."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from tests.geometry.simulation import equal, everywhere, execute, inputs, plans_of
from tests.geometry.strategies import (
    all_gathers,
    all_sum_reduces,
    broadcasts,
    halos,
    partitions,
    scatters,
    shapes,
)

few = settings(max_examples=40)
seeds = st.integers(0, 99)


@few
@given(data=st.data(), seed=seeds)
def test_repartition_keeps_the_global_tensor(data, seed):
    dim = data.draw(st.integers(1, 3))
    shape = data.draw(shapes(dim))
    P_x, P_y = data.draw(partitions(dim)), data.draw(partitions(dim))
    source, target = Decomposition.balanced(P_x, shape), Decomposition.balanced(P_y, shape)
    whole = np.random.default_rng(seed).integers(-9, 10, shape)
    origin = Box.of_shape(shape)
    plans = everywhere(source, target)
    y = execute(plans, {rank: whole[source.box(rank).slices(origin)] for rank in plans})
    assert equal(y, {rank: whole[target.box(rank).slices(origin)] for rank in plans})
    back = execute({rank: plan.T for rank, plan in plans.items()}, y)
    assert equal(back, {rank: whole[source.box(rank).slices(origin)] for rank in plans})


@few
@given(data=st.data())
def test_repartition_onto_itself_moves_nothing(data):
    shape = data.draw(shapes(2))
    blocks = Decomposition.balanced(data.draw(partitions(2)), shape)
    for plan in everywhere(blocks, blocks).values():
        assert plan.peers == ()
        assert [piece.box for piece in plan.local] == ([] if plan.own.empty else [plan.own])


def test_rebalancing_moves_only_the_surplus():
    P = Partition((0, 1, 2), (3,), me=0)
    uneven = Decomposition.from_local_shapes(P, {0: (1,), 1: (5,), 2: (3,)})
    plans = everywhere(uneven, Decomposition.balanced(P, (9,)))
    assert [plan.peers for plan in plans.values()][:3] == [(1,), (0,), ()]
    assert plans[1].sends == (Piece(0, Box(((1, 3),))),)


@settings(max_examples=150)
@given(ends=halos(), seed=seeds)
def test_halo_exchange_shows_the_input_and_zeros_beyond_it(ends, seed):
    source, target = ends
    plans = plans_of(source, target, source.partition.ranks)
    x = np.random.default_rng(seed).integers(1, 10, source.shape)
    origin = Box.of_shape(source.shape)
    y = execute(plans, {rank: x[source.box(rank).slices(origin)] for rank in plans})
    for rank, plan in plans.items():
        for place in np.ndindex(plan.need.shape):
            point = tuple(np.add(place, plan.need.start))
            inside = all(0 <= i < n for i, n in zip(point, source.shape, strict=True))
            assert y[rank][place] == (x[point] if inside else 0)


def test_halo_wider_than_its_neighbour_comes_from_several_ranks():
    P = Partition((0, 1, 2, 3), (4,), me=0)
    source = Decomposition.from_local_shapes(P, {0: (2,), 1: (0,), 2: (1,), 3: (2,)})
    reads = WindowSplit(Balanced(5, 4), Window(7, left=3, right=3), 5)
    plan = Exchange(3, source, source.with_splits({0: reads}))
    assert plan.need == Box(((1, 8),))
    assert plan.receives == (Piece(0, Box(((1, 2),))), Piece(2, Box(((2, 3),))))


def test_halo_exchange_brings_the_corners_in_one_round():
    P = Partition(tuple(range(9)), (3, 3), me=4)
    source = Decomposition.balanced(P, (9, 9))
    reads = WindowSplit(Balanced(9, 3), Window(3, left=1, right=1), 9)
    plan = Exchange(4, source, source.with_splits({0: reads, 1: reads}))
    assert plan.peers == (0, 1, 2, 3, 5, 6, 7, 8)
    assert [piece.box.volume for piece in plan.receives] == [1, 3, 1, 3, 3, 1, 3, 1]
    assert plan.T.sends == plan.receives


@few
@given(ends=broadcasts(), seed=seeds)
def test_broadcast_copies(ends, seed):
    source, target = ends
    plans = everywhere(source, target)
    x = inputs(plans, seed)
    y = execute(plans, x)
    owners = {source.box(rank): rank for rank in source.partition.ranks}
    for rank in target.partition.ranks:
        assert np.array_equal(y[rank], x[owners[target.box(rank)]])


@few
@given(ends=broadcasts(), seed=seeds)
def test_sum_reduce_adds_the_copies(ends, seed):
    copies, root = ends
    plans = everywhere(root, copies)
    x = inputs(plans, seed)
    y = execute(plans, x)
    for rank in copies.partition.ranks:
        summed = [other for other in root.partition.ranks if root.box(other) == copies.box(rank)]
        if not copies.box(rank).empty:
            assert np.array_equal(y[rank], sum(x[other] for other in summed))


def swapped(ends):
    """Plans of the movement back, and the adjoints of the plans there."""
    source, target = ends
    there, back = everywhere(source, target), everywhere(target, source)
    return back, {rank: plan.T for rank, plan in there.items()}


def same_movement(plans, others):
    return all(
        (plan.own, plan.need, plan.sends, plan.receives, plan.local)
        == (
            others[rank].own,
            others[rank].need,
            others[rank].sends,
            others[rank].receives,
            others[rank].local,
        )
        for rank, plan in plans.items()
    )


@few
@given(ends=broadcasts())
def test_sum_reduce_is_the_transpose_of_broadcast(ends):
    assert same_movement(*swapped(ends))


@few
@given(ends=all_gathers())
def test_reduce_scatter_is_the_transpose_of_all_gather(ends):
    assert same_movement(*swapped(ends))


@few
@given(ends=scatters())
def test_gather_is_the_transpose_of_scatter(ends):
    assert same_movement(*swapped(ends))


@few
@given(ends=all_sum_reduces())
def test_all_sum_reduce_is_its_own_transpose(ends):
    plans = everywhere(*ends)
    assert same_movement(plans, {rank: plan.T for rank, plan in plans.items()})


@few
@given(partition=partitions(1), shape=shapes(2), seed=seeds)
def test_all_sum_reduce_is_a_sum_reduce_and_then_a_broadcast(partition, shape, seed):
    root = Decomposition.replicated(Partition(partition.ranks[:1], (1,), me=0), shape)
    copies = Decomposition.replicated(partition, shape)
    plans = everywhere(copies, copies)
    x = inputs(plans, seed)
    at_root = execute(everywhere(copies, root), x)
    assert equal(execute(plans, x), execute(everywhere(root, copies), at_root))


@few
@given(partition=partitions(1), extent=st.integers(0, 9), seed=seeds)
def test_all_sum_reduce_is_a_reduce_scatter_and_then_an_all_gather(partition, extent, seed):
    copies = Decomposition.replicated(partition, (extent,))
    blocks = Decomposition.balanced(partition, (extent,))
    plans = everywhere(copies, copies)
    x = inputs(plans, seed)
    assert equal(
        execute(plans, x), execute(everywhere(blocks, copies), execute(everywhere(copies, blocks), x))
    )


def test_owners_that_overlap_are_summed_and_needs_that_overlap_are_copied():
    P = Partition((0, 1), (2,), me=0)
    # Parts of two outputs each, seen through windows of three inputs: [0:4) and [2:6).
    reads = Decomposition(P, (WindowSplit(Listed((2, 2)), Window(3), 6),), (0,))
    plans = plans_of(reads, Decomposition.balanced(P, (6,)), P.ranks)
    ones = {rank: np.ones(4, dtype=int) for rank in P.ranks}
    assert [y.tolist() for y in execute(plans, ones).values()] == [[1, 1, 2], [2, 1, 1]]
    back = execute({rank: plan.T for rank, plan in plans.items()}, {0: np.arange(3), 1: np.arange(3, 6)})
    assert [y.tolist() for y in back.values()] == [[0, 1, 2, 3], [2, 3, 4, 5]]

"""Exchanges: every rank plans for itself, and together the plans are one linear movement and its adjoint."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from tests.geometry.counting import Counting
from tests.geometry.simulation import equal, everywhere, execute, inputs, product_of, sum_of_owners
from tests.geometry.strategies import MOVEMENTS, RANKS, decompositions, shapes

seeds = st.integers(0, 99)
# Of each of the twelve movements, for each of the two laws.
several = settings(max_examples=50)
each_movement = pytest.mark.parametrize("movement", MOVEMENTS.values(), ids=MOVEMENTS)


@each_movement
@several
@given(data=st.data(), seed=seeds)
def test_every_movement_and_its_adjoint_add_what_is_owned_to_what_is_needed(movement, data, seed):
    plans = everywhere(*data.draw(movement))
    adjoint = {rank: plan.T for rank, plan in plans.items()}
    x, y = inputs(plans, seed), inputs(adjoint, seed + 1)
    there, back = execute(plans, x), execute(adjoint, y)
    assert equal(there, sum_of_owners(plans, x))
    assert equal(back, sum_of_owners(adjoint, y))
    assert product_of(there, y) == product_of(x, back)


@each_movement
@several
@given(data=st.data())
def test_every_movement_has_a_piece_for_every_pair_of_boxes_that_meet(movement, data):
    source, target = data.draw(movement)
    meeting = {
        (a, b): source.box(a) & target.box(b)
        for a, b in itertools.product(range(RANKS), repeat=2)
        if not (source.box(a) & target.box(b)).empty
    }
    plans = everywhere(source, target)
    for rank, plan in plans.items():
        receivers = [b for b in target.partition.ranks if (rank, b) in meeting]
        senders = [a for a in source.partition.ranks if (a, rank) in meeting]
        assert (plan.own, plan.need) == (source.box(rank), target.box(rank))
        assert plan.sends == tuple(Piece(b, meeting[rank, b]) for b in receivers if b != rank)
        assert plan.receives == tuple(Piece(a, meeting[a, rank]) for a in senders if a != rank)
        assert plan.local == tuple(Piece(a, meeting[a, rank]) for a in senders if a == rank)
        assert plan.peers == tuple(sorted({*receivers, *senders} - {rank}))
        adjoint = plan.T
        assert (adjoint.sends, adjoint.receives, adjoint.local) == (plan.receives, plan.sends, plan.local)
        assert (adjoint.own, adjoint.need, adjoint.peers) == (plan.need, plan.own, plan.peers)
        assert adjoint != plan == adjoint.T
        assert hash(adjoint.T) == hash(plan)
    fingerprints = {plan.fingerprint for plan in plans.values()}
    # It travels as a signed 64-bit number.
    assert len(fingerprints) == 1 and 0 <= plans[0].fingerprint < 1 << 63
    assert plans[0].T.fingerprint != plans[0].fingerprint == plans[0].T.T.fingerprint


def test_ranks_in_neither_partition_have_nothing_to_do_with_scalars_either():
    root, everyone = Partition((0,), (1,), me=0), Partition((0, 1), (2,), me=0)
    plans = everywhere(Decomposition.replicated(root, ()), Decomposition.replicated(everyone, ()))
    assert {rank: plan.sends for rank, plan in plans.items() if plan.sends} == {0: (Piece(1, Box(())),)}
    assert {rank: plan.receives for rank, plan in plans.items() if plan.receives} == {1: (Piece(0, Box(())),)}


@settings(max_examples=40)
@given(data=st.data())
def test_fingerprints_of_other_movements_differ(data):
    shape = data.draw(shapes(2).filter(prod))
    ends = [data.draw(decompositions(shape)) for _ in range(3)]
    first, second = Exchange(0, ends[0], ends[1]), Exchange(0, ends[0], ends[2])
    assert (first.fingerprint == second.fingerprint) == (first == second)


def test_fingerprints_tell_apart_whatever_two_layers_may_differ_in():
    grid = Partition((0, 1, 2, 3, 4, 5), (2, 3), me=0)
    halves, whole = Balanced(12, 2), Balanced(12, 1)
    ends = [
        Decomposition(grid, (halves, whole), (0, None)),
        Decomposition(Partition((0, 1, 2, 3, 5, 4), (2, 3), me=0), (halves, whole), (0, None)),
        Decomposition(grid.create_cartesian_topology_partition((3, 2)), (halves, whole), (None, 0)),
        Decomposition(grid.create_cartesian_topology_partition((2, 3, 1)), (halves, whole), (0, None, None)),
        Decomposition(grid, (whole, halves), (1, None)),
        Decomposition(grid, (Balanced(13, 2), whole), (0, None)),
        Decomposition(grid, (Listed((5, 7)), whole), (0, None)),
        Decomposition(grid, (WindowSplit(halves, Window(3), 12), whole), (0, None)),
        Decomposition(grid, (WindowSplit(halves, Window(3, left=1), 12), whole), (0, None)),
        Decomposition(grid, (whole, whole), (None, None)),
        Decomposition(grid.create_cartesian_topology_partition((3, 2)), (whole, whole), (None, None)),
    ]
    plans = [Exchange(0, *pair) for pair in itertools.product(ends, repeat=2)]
    assert len({plan.fingerprint for plan in [*plans, *(plan.T for plan in plans)]}) == 2 * len(ends) ** 2


def test_plans_know_nothing_of_the_process_that_looks_at_the_partition():
    plans = [
        Exchange(1, *(Decomposition.balanced(Partition((0, 1, 2), (3,), me), (n,)) for n in (7, 7)))
        for me in range(4)
    ]
    assert len(set(plans)) == 1
    assert len({plan.fingerprint for plan in plans}) == 1


def test_pieces_are_grouped_by_peer():
    boxes = [Box(((i, i + 1),)) for i in range(3)]
    pieces = (Piece(4, boxes[0]), Piece(2, boxes[1]), Piece(2, boxes[2]))
    assert by_peer(pieces) == [(4, pieces[:1]), (2, pieces[1:])]
    assert by_peer(()) == []


LINE = Partition(tuple(range(4096)), (4096,), me=0)
SQUARE = LINE.create_cartesian_topology_partition((64, 64))


def counted(base, splits):
    """A decomposition that cuts along all its dimensions, and what its splits were asked for."""
    counting = [Counting(split) for split in splits]
    return Decomposition(base, tuple(counting), tuple(range(base.dim))), counting


@pytest.mark.parametrize("rank", [0, 63, 2080, 4095])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (
            (SQUARE, [Balanced(1000, 64)] * 2),
            (SQUARE, [Listed((10,) * 36 + (20,) * 14 + (0,) * 4 + (36,) * 10)] * 2),
        ),
        (
            (SQUARE, [Balanced(1000, 64)] * 2),
            (SQUARE, [WindowSplit(Balanced(1000, 64), Window(5, left=2, right=2), 1000)] * 2),
        ),
        ((LINE, [Balanced(100_000, 4096)]), (LINE, [Listed((25,) * 4000 + (0,) * 96)])),
    ],
    ids=["repartition", "halo exchange", "rebalancing"],
)
def test_planning_for_one_rank_among_thousands_looks_at_few(source, target, rank):
    (source, owned), (target, needed) = counted(*source), counted(*target)
    plan = Exchange(rank, source, target)
    pieces = (*plan.sends, *plan.receives, *plan.local)
    looks = sum(len(split.asked) for split in (*owned, *needed))
    # Per dimension and direction two bisections, then the boxes found, and a few empty ones beside them.
    assert looks <= 2 * source.partition.dim * (2 * 13 + 2 + 2 * len(pieces)) + 4
    assert list(plan.peers) == sorted(plan.peers)
    assert plan.receives == tuple(
        Piece(other, source.box(other) & plan.need)
        for other in range(4096)
        if other != rank and not (source.box(other) & plan.need).empty
    )


def test_an_exchange_is_complete_only_if_every_element_gets_exactly_one():
    line, here = Partition((0, 1), (2,), 0), Partition((0,), (1,), 0)
    blocks = Decomposition.balanced(line, (4,))
    # Windows on [-1:3] and [1:5], as many elements as there are in [0:7], but two get none and two get two.
    windows = blocks.with_splits({0: WindowSplit(blocks.splits[0], Window(3, left=1, right=1), extent=4)})
    overlapping = Exchange(0, windows, Decomposition.replicated(here, (7,)))
    assert sum(p.box.volume for p in (*overlapping.local, *overlapping.receives)) == overlapping.need.volume
    assert not overlapping.disjoint
    assert not overlapping.complete
    assert Exchange(0, blocks, Decomposition.replicated(here, (4,))).complete
    assert not Exchange(0, blocks, Decomposition.replicated(here, (5,))).complete


@pytest.mark.parametrize("ranks", [64, 65, 200])
def test_what_many_ranks_give_is_known_to_be_no_sum(ranks):
    # Sums are not what is copied, bit by bit: of a negative zero, or of short types.
    line = Partition(tuple(range(ranks)), (ranks,), 0)
    whole = Decomposition.replicated(line, (2 * ranks + 1,))
    gather = Exchange(0, Decomposition.balanced(line, (2 * ranks + 1,)), whole)
    assert gather.disjoint
    assert gather.complete
    assert not Exchange(0, whole, whole).disjoint
    columns = Partition(tuple(range(ranks)), (1, ranks), 0)
    parts = Decomposition.balanced(columns, (3, 2 * ranks))
    assert Exchange(0, parts, Decomposition.replicated(columns, (3, 2 * ranks))).complete

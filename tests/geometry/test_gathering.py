"""Copies made in stages: the same as at once, whatever the nodes, and with few messages of any rank."""

from __future__ import annotations

from contextlib import contextmanager
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry import gathering as gatherings
from distdl_rma.geometry import trees
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.gathering import FlatStages, collecting, cut_copies, gathering, steps
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from tests.geometry.simulation import equal, everywhere, execute, inputs, product_of
from tests.geometry.strategies import RANKS, nodes, one_of, partitions, shapes, splits

many = settings(max_examples=100, deadline=None)
WIDTHS = st.sampled_from([(2, 2), (32, 4)])


@st.composite
def ends(draw, dim, shape):
    """A tensor on some ranks, copied along some dimensions of the grid, or all of it on one rank."""
    if draw(one_of(0, 1, 2)) == 2:
        root = Partition((draw(st.integers(0, RANKS - 1)),), (1,), 0)
        return Decomposition.replicated(root, shape)
    P = draw(partitions(dim))
    copied = draw(st.sets(st.integers(0, dim - 1)))
    axes = tuple(None if d in copied else d for d in range(dim))
    cut = (draw(splits(n, 1 if d in copied else P.shape[d])) for d, n in enumerate(shape))
    return Decomposition(P, tuple(cut), axes)


@st.composite
def movements(draw):
    """Two ends of a movement."""
    dim = draw(st.integers(1, 3))
    shape = draw(shapes(dim))
    return draw(ends(dim, shape)), draw(ends(dim, shape))


@contextmanager
def widths(fan, width, short=4096):
    """Other widths of trees, so that few ranks make deep ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "_FAN", fan)
        patch.setattr(trees, "_WIDTH", width)
        patch.setattr(gatherings, "_LONGEST_BROADCAST_WHOLE", short)
        yield


def origin_of(whole, boxes):
    """The tensor that boxes are in: of intervals, its elements as they lie."""
    return whole if all(box.dim == whole.dim for box in boxes) else Box.of_shape((whole.volume,))


def packed(x, whole, boxes):
    x, whole = x.reshape(origin_of(whole, boxes).shape), origin_of(whole, boxes)
    return np.concatenate([np.zeros(0, int), *(x[box.slices(whole)].ravel() for box in boxes if box.volume)])


def unpacked(flat, whole, boxes):
    shape, whole = whole.shape, origin_of(whole, boxes)
    y, begin = np.full(whole.shape, 10**6), 0
    for box in boxes:
        y[box.slices(whole)] = flat[begin : begin + box.volume].reshape(box.shape)
        begin += box.volume
    assert begin == flat.size
    return y.reshape(shape)


def play(plans, x):
    """What all ranks have after the steps that each of them planned."""
    depth = {len(found) for found in plans.values()}
    assert len(depth) == 1
    for at in range(depth.pop()):
        step = {rank: found[at] for rank, found in plans.items()}
        if not isinstance(step[0], FlatStages):
            x = execute({rank: Exchange(rank, *each) for rank, each in step.items()}, x)
            continue
        x = {rank: packed(x[rank], each.own, each.gives) for rank, each in step.items()}
        for stage in range(max(len(each.stages) for each in step.values())):
            there = {rank: each.stages[stage] for rank, each in step.items() if stage < len(each.stages)}
            turn = {rank: Exchange(rank, *ends) for rank, ends in there.items()}
            x = x | execute(turn, {rank: x[rank] for rank in turn})
        x = {rank: unpacked(x[rank], each.need, each.takes) for rank, each in step.items()}
    return x


@many
@given(case=movements(), node_of=nodes(), fan=WIDTHS, short=st.sampled_from([0, 4096]))
def test_stages_move_what_one_movement_moves(case, node_of, fan, short):
    source, target = case
    with widths(*fan, short):
        plans = {rank: steps(source, target, node_of, rank) for rank in range(RANKS)}
        back = {rank: steps(target, source, node_of, rank) for rank in range(RANKS)}
    at_once = everywhere(source, target)
    x, g = inputs(at_once, 1), inputs({rank: plan.T for rank, plan in at_once.items()}, 2)
    if plans[0]:
        assert equal(play(plans, x), execute(at_once, x))
        assert product_of(play(plans, x), g) == product_of(x, play(back, g))
    if back[0]:
        assert equal(play(back, g), execute({rank: plan.T for rank, plan in at_once.items()}, g))


@many
@given(data=st.data(), node_of=nodes(), fan=WIDTHS, to_all=st.booleans())
def test_blocks_of_a_line_come_to_all_ranks_or_a_root_in_an_order_that_all_know(data, node_of, fan, to_all):
    line = tuple(data.draw(st.permutations(range(RANKS)))[: data.draw(st.integers(1, RANKS))])
    lengths = [data.draw(one_of(2, 3, 1, 0)) for _ in line]
    root = data.draw(st.sampled_from(line))
    blocks = [[100 * at + n for n in range(length)] for at, length in enumerate(lengths)]
    with widths(*fan):
        if to_all:
            plans = {rank: gathering(line, lengths, node_of, rank) for rank in line}
        else:
            plans = {rank: collecting(line, lengths, root, node_of, rank) for rank in line}
    x = {rank: np.array(blocks[at], int) for at, rank in enumerate(line)}
    stages, order = plans[root]
    assert sorted(order) == list(range(len(line)))
    assert {found for _, found in plans.values()} == {order}
    for at in range(len(stages)):
        x = execute({rank: Exchange(rank, *found[at]) for rank, (found, _) in plans.items()}, x)
    whole = [value for block in order for value in blocks[block]]
    assert all(x[rank].tolist() == (whole if to_all or rank == root else []) for rank in line)


def messages(found, rank):
    """Messages that a rank sends in all of its steps, and elements."""
    plans = []
    for step in found:
        pairs = step.stages if isinstance(step, FlatStages) else [step]
        plans += [Exchange(rank, *pair) for pair in pairs]
    peers = [{piece.peer for piece in plan.sends} for plan in plans]
    return sum(map(len, peers)), sum(piece.box.volume for plan in plans for piece in plan.sends)


@pytest.mark.parametrize("per_node", [1, 16])
@pytest.mark.parametrize("size", [64, 256, 1024])
def test_all_gather_takes_few_messages_and_no_more_elements(size, per_node):
    P = Partition(tuple(range(size)), (size,), 0)
    source, target = Decomposition.balanced(P, (4 * size,)), Decomposition.replicated(P, (4 * size,))
    for rank in (0, size // 2 + 1, size - 1):
        for ends in ((source, target), (target, source)):
            sent, elements = messages(steps(*ends, lambda rank: rank // per_node, rank), rank)
            assert sent <= 31 + per_node - 1 + 2 * ceil(log2(size / per_node))
            assert elements <= 4 * (size - 1)


def test_on_one_node_and_among_few_nodes_all_moves_at_once():
    P = Partition(tuple(range(32)), (32,), 0)
    source, target = Decomposition.balanced(P, (64,)), Decomposition.replicated(P, (64,))
    assert steps(source, target, lambda rank: 0, 3) == []
    assert steps(source, target, lambda rank: rank, 3) == []
    assert steps(source, source, lambda rank: rank // 2, 3) == []


def test_uneven_nodes_hand_their_surplus_to_those_with_counterparts():
    stages, order = gathering((0, 1, 2), (1, 1, 1), lambda rank: rank // 2, 1)
    assert order == (0, 1, 2)
    assert [Exchange(1, *stage).sends for stage in stages] == [Exchange(1, *stages[0]).sends, (), ()]
    assert Exchange(1, *stages[0]).sends[0].peer == 0


def test_copies_are_cut_where_the_other_end_is():
    P = Partition(tuple(range(6)), (2, 3), 0)
    target = Decomposition(P, (Balanced(4, 2), Balanced(9, 1)), (0, None))
    other = Decomposition.balanced(P, (4, 9))
    there = cut_copies(target, other)
    assert [there.box(rank) for rank in P.ranks] == [other.box(rank) for rank in P.ranks]
    line = Decomposition.balanced(Partition(tuple(range(6)), (6, 1), 0), (6, 1))
    assert cut_copies(Decomposition.replicated(P, (6, 1)), line).shape == (6, 1)


@pytest.mark.parametrize("per_node", [1, 16])
@pytest.mark.parametrize("root", [0, 700])
def test_what_one_rank_has_comes_to_1024_and_back_in_few_messages_and_elements(root, per_node):
    P, R = Partition(tuple(range(1024)), (1024,), 0), Partition((root,), (1,), 0)
    most = 31 + per_node - 1 + 2 * ceil(log2(1024 / per_node))
    for n in (10, 1 << 20):
        ends = Decomposition.replicated(R, (n,)), Decomposition.replicated(P, (n,))
        for rank in (0, root, 500, 1023):
            plans = [steps(*each, lambda rank: rank // per_node, rank) for each in (ends, ends[::-1])]
            (there, given), (back, taken) = (messages(plan, rank) for plan in plans)
            if n == 10:
                assert there <= 2 * 31 + 15 and back <= 2
            else:
                assert max(there, back) <= 2 * most and max(given, taken) <= 2.1 * n
    source, target = Decomposition.balanced(P, (4096,)), Decomposition.replicated(R, (4096,))
    plans = {rank: steps(source, target, lambda rank: rank // 16, rank) for rank in (root, 16, 25, 1023)}
    received = sum(len(Exchange(root, *stage).receives) for stage in plans[root][0].stages)
    assert received == 15 + 3 + 15
    assert all(messages(plan, rank)[0] <= 1 for rank, plan in plans.items())

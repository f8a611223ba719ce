"""Ranks of a collective by node, on random machines: everything is worked on once, and where it belongs."""

import random
import sys
from doctest import DocTestFinder, DocTestRunner

import pytest

from distdl_rma.segments.collectives.allreduce import all_push_is_better
from distdl_rma.segments.collectives.equality_check import turns_between_leaders
from distdl_rma.segments.collectives.node_layout import NodeLayout


def machine_nodes(size, per_node):
    ranks = tuple(range(size))
    return tuple(ranks[begin : begin + per_node] for begin in range(0, size, per_node))


@pytest.mark.parametrize("seed", range(30))
def test_shares_of_a_node_are_the_whole_vector_and_meet_the_same_share_elsewhere(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 30)
    order = rng.sample(range(40), size)
    cuts = sorted(rng.sample(range(1, 40), rng.randint(0, 6)))
    nodes = tuple(tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, 40], strict=True))
    count = rng.randint(0, 50)
    for me in order:
        layout = NodeLayout(tuple(order), nodes, me)
        assert sorted(rank for node in layout.nodes for rank in node) == sorted(order)
        covered = []
        for holder in layout.holders:
            part = NodeLayout(tuple(order), nodes, holder).share(count)
            covered += range(part.start, part.stop)
        assert covered == list(range(count))
        shares = [NodeLayout(tuple(order), nodes, rank).share(count) for rank in layout.same_share]
        assert all(share == shares[0] for share in shares)
        assert len(layout.same_share) == (0 if layout.my_share is None else len(layout.nodes))


@pytest.mark.parametrize("function", [turns_between_leaders, all_push_is_better])
def test_the_example_of_a_function_is_what_it_returns(function):
    (example,) = DocTestFinder(recurse=False).find(function, globs=vars(sys.modules[function.__module__]))
    assert DocTestRunner().run(example) == (0, len(example.examples))
    assert example.examples

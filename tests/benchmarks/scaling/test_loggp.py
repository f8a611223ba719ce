"""Seconds of messages by LogGP are its closed forms."""

from __future__ import annotations

import pytest

from benchmarks.scaling.loggp import Network, Span, Wire
from benchmarks.scaling.plans import Cluster, Movement, Round, Sum, Told, Vote
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.halo import Window, WindowSplit

NEAR, FAR = Wire(1.0, 2.0, 10.0, 0.5, 5.0), Wire(100.0, 200.0, 1000.0, 50.0, 300.0)


def halo(cluster, me, extent):
    own = Decomposition.balanced(cluster.partition(me), (1, 1, extent, 6))
    need = own.with_splits({2: WindowSplit(own.splits[2], Window(3, 1, 1, 1, 1), extent)})
    return Movement(Exchange(me, own, need))


def line(size, per_node):
    return Network(Cluster((1, 1, size, 1), per_node), NEAR, FAR)


# A network's ranks, and those of each of its nodes; what is sent, by which rank, and what this takes.
SPANS = {
    # A row of six numbers each way: bytes keep the sender busy on a node, and travel between nodes.
    "halo on a node": (2, 2, lambda cluster: halo(cluster, 0, 8), 0, Span(1 + 2 + 24 * 0.5, 10.0)),
    "halo between nodes": (2, 1, lambda cluster: halo(cluster, 0, 8), 0, Span(100 + 200, 1000 + 24 * 50.0)),
    # One neighbour on the node, and one beyond, whose bytes meet those that the other rank may send there.
    "shared wire": (4, 2, lambda cluster: halo(cluster, 1, 16), 1, Span(3 + 12 + 300, 1000 + 2 * 24 * 50.0)),
    # A message to everyone.
    "round on a node": (4, 4, lambda _: Round(8), 0, Span(3 * (3 + 8 * 0.5), 10.0)),
    "round between nodes": (4, 1, lambda _: Round(8), 0, Span(3 * 300, 1000 + 3 * 8 * 50.0)),
    "round of one rank": (1, 1, lambda _: Round(8), 0, Span()),
    # 2,000 doubles, of which each of four ranks sums 500 of the three others and stores them there.
    "sum on a node": (4, 4, lambda _: Sum(2000, 8), 0, Span(2 * 3 * 4000 * 0.5 + 6, 20.0)),
    # A turn for every fourfold of nodes: of ten nodes three of the first turn, and two of the second.
    "vote on a node": (4, 4, lambda _: Vote(), 1, Span(3.0, 20.0)),
    "vote between nodes": (10, 1, lambda _: Vote(), 0, Span(3 + 5 * 300, 20.0 + 2 * 1000)),
    # What is told to all is passed on: to four others of a node.
    "told": (4, 4, lambda _: Told(8), 0, Span(3 + 3 * 8 * 0.5, 10.0)),
    "told of one rank": (1, 1, lambda _: Told(8), 0, Span()),
}


@pytest.mark.parametrize("what", SPANS)
def test_what_is_sent_takes_the_seconds_of_the_closed_form(what):
    size, per_node, sent, rank, expected = SPANS[what]
    network = line(size, per_node)
    assert network.span(sent(network.cluster), rank) == expected


@pytest.mark.parametrize("nodes", [2, 4, 8, 512])
def test_a_sum_over_nodes_takes_a_logarithm_of_rounds_and_moves_nearly_all_twice(nodes):
    rounds = nodes.bit_length() - 1
    span = line(nodes, 1).span(Sum(2000, 8), 0)
    assert span.busy == 0.0
    assert span.travels == pytest.approx(2 * rounds * 300 + 2 * 16000 * (nodes - 1) / nodes * 50)


def test_small_sums_go_to_everyone_at_once():
    assert line(4, 1).span(Sum(4, 8), 0) == line(4, 1).span(Round(32), 0)
    assert line(4, 1).span(Sum(2000, 8, one_round=True), 0) == line(4, 1).span(Round(16000), 0)
    # Beyond 32 ranks nothing does.
    assert line(64, 1).span(Sum(4, 8, one_round=True), 0).travels == 2 * 6 * 300 + 2 * 32 * 63 / 64 * 50


def test_compute_hides_what_travels_and_nothing_else():
    span = Span(3.0, 10.0)
    assert [span.behind(compute) for compute in (0.0, 4.0, 10.0, 20.0)] == [13.0, 9.0, 3.0, 3.0]
    assert span.slowed(2) == Span(6.0, 10.0)

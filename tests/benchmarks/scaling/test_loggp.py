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
    return Movement(
        Exchange(me, own, own.with_splits({2: WindowSplit(own.splits[2], Window(3, 1, 1, 1, 1), extent)}))
    )


def line(size, per_node):
    return Network(Cluster((1, 1, size, 1), per_node), NEAR, FAR)


def test_between_two_ranks_of_a_node_bytes_keep_the_sender_busy():
    # A row of six numbers each way.
    assert line(2, 2).span(halo(line(2, 2).cluster, 0, 8), 0) == Span(1 + 2 + 24 * 0.5, 10.0)


def test_between_two_nodes_bytes_travel():
    assert line(2, 1).span(halo(line(2, 1).cluster, 0, 8), 0) == Span(100 + 200, 1000 + 24 * 50.0)


def test_the_ranks_of_a_node_share_its_wire():
    network = line(4, 2)
    # One neighbour on the node, and one beyond, whose bytes meet those that the other rank may send there.
    assert network.span(halo(network.cluster, 1, 16), 1) == Span(3 + 12.0 + 300, 1000 + 2 * 24 * 50.0)


def test_a_round_costs_a_message_to_everyone():
    assert line(4, 4).span(Round(8), 0) == Span(3 * (3 + 8 * 0.5), 10.0)
    assert line(4, 1).span(Round(8), 0) == Span(3 * 300, 1000 + 3 * 8 * 50.0)
    assert line(1, 1).span(Round(8), 0) == Span()


def test_a_sum_on_a_node_loads_and_stores_a_share_of_all():
    # 2,000 doubles, of which each of four ranks sums 500 of the three others and stores them there.
    assert line(4, 4).span(Sum(2000, 8), 0) == Span(2 * 3 * 4000 * 0.5 + 6, 20.0)


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


def test_a_vote_takes_a_turn_for_every_fourfold_of_nodes():
    assert line(4, 4).span(Vote(), 1) == Span(3.0, 20.0)
    # Ten nodes: three of the first turn, and two of the second.
    assert line(10, 1).span(Vote(), 0) == Span(3 + 5 * 300, 20.0 + 2 * 1000)


def test_what_is_told_to_all_is_passed_on():
    # Four to four others of a node, and one to the other three where each is on a node of its own.
    assert line(4, 4).span(Told(8), 0) == Span(3 + 3 * 8 * 0.5, 10.0)
    assert line(1, 1).span(Told(8), 0) == Span()

"""All-to-alls: a transposition of blocks, and who hands on which of them between nodes."""

import random

import pytest

from distdl_rma.segments.collectives.alltoall import AlltoallBlocks
from distdl_rma.segments.collectives.node_layout import NodeLayout
from tests.segments.collectives.test_node_layout import machine_nodes


@pytest.mark.parametrize("seed", range(30))
def test_every_block_of_an_all_to_all_is_sent_by_one_rank_and_taken_by_one(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    order = tuple(rng.sample(range(12), size))
    nodes = machine_nodes(12, rng.randint(1, 12))
    rows = tuple(tuple(rng.choice((0, 1, 9)) for _ in order) for _ in order)
    sent, taken = [], []
    for me in order:
        layout = NodeLayout(order, nodes, me)
        blocks = AlltoallBlocks(layout, rows)
        for node, out, came in zip(layout.nodes, blocks.outgoing(), blocks.incoming(), strict=True):
            assert all(route.source in layout.here and route.target in node for route in out)
            assert all(route.source in node and route.target in layout.here for route in came)
            sent += [(route.source, route.target) for route in out]
            taken += [(route.source, route.target) for route in came]
            # What one sends is what the other takes, in the same order.
            peer = layout.my_share if layout.my_share is not None and node != layout.here else None
            if peer is not None:
                there = AlltoallBlocks(NodeLayout(order, nodes, node[peer]), rows)
                assert there.incoming()[layout.my_node] == out
    far = [
        (a, b)
        for i, a in enumerate(order)
        for j, b in enumerate(order)
        if rows[i][j] and not any(a in node and b in node for node in nodes)
    ]
    assert sorted(sent) == sorted(far) == sorted(taken)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_fill_operands_and_results_without_overlap(seed):
    rng = random.Random(seed)
    order = tuple(rng.sample(range(9), rng.randint(1, 9)))
    rows = tuple(tuple(rng.choice((0, 1, 9)) for _ in order) for _ in order)
    blocks = AlltoallBlocks(NodeLayout(order, machine_nodes(9, 2), order[0]), rows)
    begin = blocks.longest_operand
    for me in order:
        sent = [k for peer in order for k in range(*blocks.in_operand(me, peer).indices(999))]
        assert sent == list(range(sum(blocks.sends(me)))) and len(sent) <= begin
        got = [k for peer in order for k in range(*blocks.in_result(peer, me).indices(999))]
        assert got == list(range(begin, begin + sum(blocks.receives(me))))
        assert len(got) <= blocks.longest_result

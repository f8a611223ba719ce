"""Nodes of a machine as tests would have them."""

from contextlib import contextmanager


@contextmanager
def pretended_nodes(machine, nodes=None):
    """Ranks on other nodes than they are, as far as movements look: two on each if none are given."""
    segment, ranks = machine.segments.segment, machine.ranks
    true, in_pairs = segment.nodes, tuple(ranks[at : at + 2] for at in range(0, len(ranks), 2))
    segment.nodes = in_pairs if nodes is None else nodes
    try:
        yield
    finally:
        segment.nodes = true

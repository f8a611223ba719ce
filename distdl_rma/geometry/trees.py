"""Broadcasts and sum-reductions as movements of flat vectors, by way of the nodes where there are several.

Several groups of ranks work at once. Each group has a vector: on every one of its ranks (copies, which are
summed where they are sources), or cut into one share per rank. The vectors of all groups, one behind the
other, are the global tensor of a movement; the movements of a plan follow one another on local vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.rank_groups import Groups
from distdl_rma.geometry.split import Balanced, Copies, Listed, Split

# Source and target of one movement.
Stage = tuple[Decomposition, Decomposition]
NodeOf = Callable[[int], int]

# One rank of a tree over nodes receives from so many others at most.
_FAN = 32
# Vectors of so few elements go to everybody on a node at once: one step instead of two.
_SHORT = 4096
_FEW = 8


def copies(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds the whole vector of its group."""
    places = tuple(number for number, group in enumerate(groups) for _ in group)
    return _flat(groups, Copies(Listed(tuple(lengths)), places), me)


def shares(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds its balanced share of the vector of its group."""
    parts = tuple(chain.from_iterable(map(_share_lengths, groups, lengths)))
    return _flat(groups, Listed(parts), me)


def reduction(
    groups: Groups, roots: Sequence[int], lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Sum the vectors of each group to its root, which need not be a member.

    On one node that is one movement. Over nodes the ranks of a node give theirs to one of them first, then
    as many of these as a tree of a limited width allows give theirs to one of them, and so on.

    Parameters
    ----------
    groups
        Rank ids; no rank is in two groups.
    roots
        One rank id per group, each once.
    lengths
        Number of elements of the vector of each group.
    node_of
        Number of the node of a rank id.
    me
        Rank id of the process that plans.
    """
    stages: list[Stage] = []
    if any(len({*map(node_of, (*group, root))}) > 1 for group, root in zip(groups, roots, strict=True)):
        teams = [_by_node(group, node_of) for group in groups]
        if _all_alone(teams):
            teams = [_fans(group) for group in groups]
        while not _all_alone(teams):
            stage, groups = _lead(teams, roots, lengths, me)
            stages.append(stage)
            teams = [_fans(group) for group in groups]
    return [*stages, (copies(groups, lengths, me), copies(tuple((root,) for root in roots), lengths, me))]


def broadcast(
    roots: Sequence[int], groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Copy the vector of each root to its group: a reduction read from its end."""
    return reversed_stages(reduction(groups, roots, lengths, node_of, me))


def reversed_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The adjoint of movements that follow one another."""
    return [(target, source) for source, target in reversed(stages)]


def all_reduction(groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int) -> list[Stage]:
    """Sum the vectors of each group to all its ranks; bitwise alike on all of them.

    Two ranks, or a few with a short vector, send all that they have. Otherwise every rank of a node sums a
    share, the ranks with the same share on different nodes sum theirs likewise, and all is handed back.
    """
    nodes = [_by_node(group, node_of) for group in groups]
    alone = all(len(found) == 1 for found in nodes)
    size = max(map(len, groups))
    if size <= 2 or (alone and size <= _FEW and max(lengths) <= _SHORT):
        whole = copies(groups, lengths, me)
        return [(whole, whole)]
    # As many shares as the smallest node of a group has ranks.
    widths = [min(map(len, found)) for found in nodes]
    teams = tuple(team for found in nodes for team in found)
    sharing = tuple(team[:width] for found, width in zip(nodes, widths, strict=True) for team in found)
    of_teams = [n for found, n in zip(nodes, lengths, strict=True) for _ in found]
    scatter = (copies(teams, of_teams, me), shares(sharing, of_teams, me))
    if alone:
        return [scatter, *reversed_stages([scatter])]
    lanes = tuple(
        tuple(team[lane] for team in found)
        for found, width in zip(nodes, widths, strict=True)
        for lane in range(width)
    )
    of_lanes = [
        part for n, width in zip(lengths, widths, strict=True) for part in _share_lengths(range(width), n)
    ]
    across = (copies(lanes, of_lanes, me), shares(lanes, of_lanes, me))
    there = [scatter, across]
    return [*there, *reversed_stages(there)]


def _flat(groups: Groups, split: Split, me: int) -> Decomposition:
    ranks = tuple(chain.from_iterable(groups))
    return Decomposition(Partition(ranks, (len(ranks),), me), (split,), (0,))


def _share_lengths(group: Sequence[int], length: int) -> list[int]:
    split = Balanced(length, len(group))
    return [stop - start for start, stop in map(split.interval, range(len(group)))]


def _by_node(group: Sequence[int], node_of: NodeOf) -> Groups:
    found: dict[int, list[int]] = {}
    for rank in group:
        found.setdefault(node_of(rank), []).append(rank)
    return tuple(map(tuple, found.values()))


def _fans(group: Sequence[int]) -> Groups:
    width = _FAN if len(group) > _FAN else 1
    return tuple(tuple(group[at : at + width]) for at in range(0, len(group), width))


def _all_alone(teams: Sequence[Groups]) -> bool:
    return all(len(team) == 1 for found in teams for team in found)


def _lead(
    teams: Sequence[Groups], roots: Sequence[int], lengths: Sequence[int], me: int
) -> tuple[Stage, Groups]:
    # Each team of each group sums to one of its own: the root where it is among them.
    leaders = tuple(
        tuple(root if root in team else team[0] for team in found)
        for found, root in zip(teams, roots, strict=True)
    )
    of_teams = [n for found, n in zip(teams, lengths, strict=True) for _ in found]
    led = tuple((leader,) for group in leaders for leader in group)
    source = copies(tuple(chain.from_iterable(teams)), of_teams, me)
    return (source, copies(led, of_teams, me)), leaders

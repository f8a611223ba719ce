"""Broadcasts and sum-reductions as movements of flat vectors, by way of the nodes where there are several.

Several groups of ranks work at once. Each group has a vector: on every one of its ranks (copies, which are
summed where they are sources), or cut into one share per rank. The vectors of all groups, one behind the
other, are the global tensor of a movement; the movements of a plan follow one another on local vectors.

Groups are rank ids, and no rank is in two; ``lengths`` are the elements of their vectors, ``node_of`` gives
the number of a rank's node, ``me`` is the rank of the process that plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Copies, Listed, Split
from distdl_rma.geometry.partition import Groups, Partition, grouped, leaders, share_holders

# Source and target of one movement.
Stage = tuple[Decomposition, Decomposition]
NodeOf = Callable[[int], int]

# One rank of a tree over nodes receives from so many others at most.
_FAN = 32
# Each turn of a dissemination makes what is known so many times as much; teams of ranks that are alone on
# their nodes are of so many.
_WIDTH = 4
# Vectors of so few elements go to everybody on a node at once: one step instead of two.
_SHORT = 4096
_FEW = 8


def copies(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds the whole vector of its group."""
    places = tuple(number for number, group in enumerate(groups) for _ in group)
    return _flat(groups, Copies(Listed(tuple(lengths)), places), me)


def shares(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds its balanced share of the vector of its group."""
    cut = (Balanced(n, len(group)).lengths for group, n in zip(groups, lengths, strict=True))
    return _flat(groups, Listed(tuple(chain.from_iterable(cut))), me)


def reduction(
    groups: Groups, roots: Sequence[int], lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Sum the vectors of each group to its root, which need not be a member; each rank is one root at most.

    On one node that is one movement. Over nodes the ranks of a node give theirs to one of them first, then
    as many of these as a tree of a limited width allows give theirs to one of them, and so on.
    """
    stages: list[Stage] = []
    if any(len({*map(node_of, (*group, root))}) > 1 for group, root in zip(groups, roots, strict=True)):
        teams = [grouped(group, node_of) for group in groups]
        if _all_alone(teams):
            teams = [_fans(group) for group in groups]
        while not _all_alone(teams):
            stage, groups = _to_leaders(teams, roots, lengths, me)
            stages.append(stage)
            teams = [_fans(group) for group in groups]
    return [*stages, (copies(groups, lengths, me), copies(tuple((root,) for root in roots), lengths, me))]


def broadcast(
    roots: Sequence[int], groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Copy the vector of each root to its group: a reduction read from its end."""
    return reversed_stages(reduction(groups, roots, lengths, node_of, me))


def dissemination(size: int) -> list[tuple[int, ...]]:
    """How what each of so many places knows comes to all: in turns, each over some distances.

    In a turn each place tells all that it knows to those so many places behind it, around the end, and hears
    from those before it. Each turn makes what a place knows four times as much.
    """
    reach = [_WIDTH**turn for turn in range(size.bit_length()) if _WIDTH**turn < size]
    return [tuple(n * step for n in range(1, _WIDTH) if n * step < size) for step in reach]


def reversed_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The adjoint of movements that follow one another."""
    return [(target, source) for source, target in reversed(stages)]


def all_reduction(groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int) -> list[Stage]:
    """Sum the vectors of each group to all its ranks; bitwise alike on all of them.

    Two ranks, or a few with a short vector, send all that they have. Otherwise every rank of a node sums a
    share, the ranks with the same share on different nodes sum theirs likewise, and all is handed back. A
    group of ranks 0 to 2 on one node and 3 to 5 on another has three shares: ranks 0 and 3 sum the first
    third, each of what its node has, then a half of that third each, of what both nodes have. Of more nodes
    than a rank should talk to, a few do so first, and those with the same share of theirs after that.
    """
    one_node = all(len(grouped(group, node_of)) == 1 for group in groups)
    size = max(map(len, groups))
    if size <= 2 or (one_node and size <= _FEW and max(lengths) <= _SHORT):
        whole = copies(groups, lengths, me)
        return [(whole, whole)]
    stages = _to_shares(groups, lengths, node_of, me)
    return [*stages, *reversed_stages(stages)]


def teams_of(group: Sequence[int], node_of: NodeOf) -> Groups:
    """Ranks that share what they have before they talk to others: those of a node, or a few of many nodes.

    One team, the group itself, where nothing is gained by others.
    """
    nodes = grouped(group, node_of)
    if len(nodes) == 1 or len(nodes) < len(group):
        return nodes
    if len(group) <= _FAN:
        return (tuple(group),)
    cut = Balanced(len(group), max(1, len(group) // _WIDTH))
    return tuple(tuple(group[slice(*cut.interval(team))]) for team in range(cut.parts))


def _to_shares(groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int) -> list[Stage]:
    # Until every rank has a share of its own of the sum of its group.
    if max(map(len, groups)) == 1:
        return []
    teams = [teams_of(group, node_of) for group in groups]
    holders = [share_holders(found) for found in teams]
    of_teams = _repeated(lengths, teams)
    stage = copies(_joined(teams), of_teams, me), shares(_joined(holders), of_teams, me)
    same_share = tuple(chain.from_iterable(zip(*held, strict=True) for held in holders))
    cut = (Balanced(n, len(held[0])).lengths for n, held in zip(lengths, holders, strict=True))
    return [stage, *_to_shares(same_share, list(chain.from_iterable(cut)), node_of, me)]


def _flat(groups: Groups, split: Split, me: int) -> Decomposition:
    ranks = tuple(chain.from_iterable(groups))
    return Decomposition(Partition(ranks, (len(ranks),), me), (split,), (0,))


def _fans(group: Sequence[int]) -> Groups:
    width = _FAN if len(group) > _FAN else 1
    return tuple(tuple(group[at : at + width]) for at in range(0, len(group), width))


def _all_alone(teams: Sequence[Groups]) -> bool:
    return all(len(team) == 1 for team in _joined(teams))


def _joined(teams: Sequence[Groups]) -> Groups:
    return tuple(chain.from_iterable(teams))


def _repeated(lengths: Sequence[int], teams: Sequence[Groups]) -> list[int]:
    # The length of each group's vector, for every team of it.
    return list(chain.from_iterable(repeat(n, len(found)) for found, n in zip(teams, lengths, strict=True)))


def _to_leaders(
    teams: Sequence[Groups], roots: Sequence[int], lengths: Sequence[int], me: int
) -> tuple[Stage, Groups]:
    # Each team of each group sums to one of its own: the root where it is among them.
    led = tuple(leaders(found, root) for found, root in zip(teams, roots, strict=True))
    of_teams = _repeated(lengths, teams)
    alone = tuple((leader,) for group in led for leader in group)
    return (copies(_joined(teams), of_teams, me), copies(alone, of_teams, me)), led

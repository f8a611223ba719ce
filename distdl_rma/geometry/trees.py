"""Broadcasts and sum-reductions as movements of flat vectors, in stages if there are several nodes.

Several groups of ranks work at once. Each group has a vector: either each of its ranks has a copy (copies are
summed if they are sources), or each rank has one share. The vectors of all groups, back to back, are the
global tensor of a movement. The movements of a plan are executed one after another on local vectors.

Groups are disjoint tuples of rank ids; ``lengths`` are the numbers of elements of their vectors; ``node_of``
maps a rank to its node's number; ``me`` is the rank that plans.

A sum of one vector over eight ranks on four nodes, to rank 0::

    node 0   0 <- 1                    stage 1: each node sums to its leader, by load and store
    node 1   2 <- 3      2 --.
    node 2   4 <- 5      4 ---> 0      stage 2: leaders send to the root, a message each
    node 3   6 <- 7      6 --'

Directly, six vectors would travel between nodes, in place of three. Beyond 32 leaders there is a stage more:
a rank that receives from hundreds of others needs memory for the vector of each, and receives one by one.

Every stage is a pair of decompositions of one long vector, so that an ``Exchange`` carries it out, and the
broadcast is the reduction read backwards. All ranks plan the same stages.
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

# Most ranks from which a rank of a tree over nodes receives.
_FAN = 32
# Factor by which a turn of a dissemination multiplies what a place has; and size of teams of ranks alone on
# their nodes.
_WIDTH = 4
# Longest vector in elements, and largest group on one node, for which all ranks send their whole vectors to
# each other: one step instead of two.
_LONGEST_SENT_WHOLE = 4096
_FEW = 8


def copies(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds the whole vector of its group."""
    places = tuple(number for number, group in enumerate(groups) for _ in group)
    return flat(groups, Copies(Listed(tuple(lengths)), places), me)


def shares(groups: Groups, lengths: Sequence[int], me: int) -> Decomposition:
    """Every rank holds its balanced share of the vector of its group."""
    cut = (Balanced(n, len(group)).lengths for group, n in zip(groups, lengths, strict=True))
    return flat(groups, Listed(tuple(chain.from_iterable(cut))), me)


def reduction(
    groups: Groups, roots: Sequence[int], lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Sum the vectors of each group to its root, which need not be a member.

    Each rank is the root of at most one group. On one node, the sum is one movement. Over several nodes, the
    ranks of a node first send their vectors to one of them. Then the chosen ranks do the same in groups of
    limited width, level by level.
    """
    stages: list[Stage] = []
    if any(len({*map(node_of, (*group, root))}) > 1 for group, root in zip(groups, roots, strict=True)):
        teams = [grouped(group, node_of) for group in groups]
        if _all_alone(teams):
            teams = [_fans(group) for group in groups]
        while not _all_alone(teams):
            # Each team sums to one of its ranks, its leader: the root if it is a member.
            of_teams, members = _repeated(lengths, teams), _joined(teams)
            groups = tuple(leaders(found, root) for found, root in zip(teams, roots, strict=True))
            alone = tuple((leader,) for group in groups for leader in group)
            stages.append((copies(members, of_teams, me), copies(alone, of_teams, me)))
            teams = [_fans(group) for group in groups]
    return [*stages, (copies(groups, lengths, me), copies(tuple((root,) for root in roots), lengths, me))]


def broadcast(
    roots: Sequence[int], groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int
) -> list[Stage]:
    """Copy the vector of each root to its group: the adjoint of the reduction."""
    return reversed_stages(reduction(groups, roots, lengths, node_of, me))


def dissemination(size: int) -> list[tuple[int, ...]]:
    """Distances in each turn of an exchange after which all ``size`` places have all contributions.

    In a turn, each place sends everything that it has to the places at these distances behind it, cyclically,
    and receives from those before it. Each turn multiplies the contributions that a place has by four.
    """
    reach = [_WIDTH**turn for turn in range(size.bit_length()) if _WIDTH**turn < size]
    return [tuple(n * step for n in range(1, _WIDTH) if n * step < size) for step in reach]


def reversed_stages(stages: Sequence[Stage]) -> list[Stage]:
    """Adjoint of consecutive movements."""
    return [(target, source) for source, target in reversed(stages)]


def all_reduction(groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int) -> list[Stage]:
    """Sum the vectors of each group to all its ranks; the sums are bitwise equal on all of them.

    Two ranks, or a few with a short vector, send their whole vectors. Otherwise every rank of a node sums one
    share, the ranks with the same share on different nodes sum it likewise, and the way back distributes the
    sums. Example: a group has ranks 0 to 2 on one node and 3 to 5 on another. There are three shares. Ranks 0
    and 3 each sum the first third over their node; then each sums one half of that third over both nodes. If
    there are more nodes than a rank should exchange messages with, a few of them form a team first.
    """
    one_node = all(len(grouped(group, node_of)) == 1 for group in groups)
    size = max(map(len, groups))
    if size <= 2 or (one_node and size <= _FEW and max(lengths) <= _LONGEST_SENT_WHOLE):
        whole = copies(groups, lengths, me)
        return [(whole, whole)]
    stages = _to_shares(groups, lengths, node_of, me)
    return [*stages, *reversed_stages(stages)]


def teams_of(group: Sequence[int], node_of: NodeOf) -> Groups:
    """Teams of ranks that combine their vectors before they communicate with other teams.

    A team is the ranks of a node, or a few ranks if each is alone on its node. The group itself is the only
    team if more teams would gain nothing.
    """
    nodes = grouped(group, node_of)
    if len(nodes) == 1 or len(nodes) < len(group):
        return nodes
    if len(group) <= _FAN:
        return (tuple(group),)
    cut = Balanced(len(group), max(1, len(group) // _WIDTH))
    return tuple(tuple(group[slice(*cut.interval(team))]) for team in range(cut.parts))


def _to_shares(groups: Groups, lengths: Sequence[int], node_of: NodeOf, me: int) -> list[Stage]:
    # Stages after which every rank has one share of its group's sum.
    if max(map(len, groups)) == 1:
        return []
    teams = [teams_of(group, node_of) for group in groups]
    holders = [share_holders(found) for found in teams]
    of_teams = _repeated(lengths, teams)
    stage = copies(_joined(teams), of_teams, me), shares(_joined(holders), of_teams, me)
    same_share = tuple(chain.from_iterable(zip(*held, strict=True) for held in holders))
    cut = (Balanced(n, len(held[0])).lengths for n, held in zip(lengths, holders, strict=True))
    return [stage, *_to_shares(same_share, list(chain.from_iterable(cut)), node_of, me)]


def flat(groups: Groups, split: Split, me: int) -> Decomposition:
    """Vectors of all groups back to back, in parts: one for each rank."""
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
    # The length of each group's vector, once per team of the group.
    return list(chain.from_iterable(repeat(n, len(found)) for found, n in zip(teams, lengths, strict=True)))

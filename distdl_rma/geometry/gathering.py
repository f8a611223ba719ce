"""Movements to replicas, and their adjoints, in stages over nodes, with few messages per rank.

A *line* is a set of target ranks that hold the same box, along the grid dimensions that replicate. If a line
spans several nodes, it first gets every element once; then its ranks exchange their elements. Sums over
replicas of the source are the adjoint.

A tensor whose rows are on four ranks becomes a copy on each of them; two nodes, letters are quarters of it::

               before      stage 1, between nodes      stage 2, on each node
    node 0   0: a           0: a c                      0: a c b d
             1: b           1: b d                      1: a c b d
    node 1   2: c           2: a c                      2: a c b d
             3: d           3: b d                      3: a c b d

Each element comes to a node once: the direct movement would send c and d to node 0 twice each. The price is
the order. Vectors arrive in that of the stages (here a c b d), and ``takes`` says which box of the tensor
each part is, so that one copy puts them in place.

Whether this is worth while depends on the nodes and on lengths alone, which all ranks know: ``steps`` is a
pure function, and tests play all ranks of any machine in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from distdl_rma.geometry import trees
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Groups, Partition, groups_along, leaders, share_holders
from distdl_rma.geometry.trees import NodeOf, Stage

# Longest vectors, in elements, that are broadcast whole, along a tree.
_LONGEST_BROADCAST_WHOLE = 4096


@dataclass(frozen=True)
class FlatStages:
    """Consecutive movements of flat vectors, and the places of their elements in the tensors.

    ``own`` and ``need`` are the boxes of the tensors that a rank has before and after. The input vector
    consists of the boxes ``gives``, back to back; the output vector of the boxes ``takes``. Boxes of one
    dimension are intervals of the tensor's elements in row-major order.
    """

    stages: tuple[Stage, ...]
    own: Box
    gives: tuple[Box, ...]
    need: Box
    takes: tuple[Box, ...]

    @property
    def T(self) -> FlatStages:  # noqa: N802
        """The adjoint."""
        stages = tuple(trees.reversed_stages(self.stages))
        return FlatStages(stages, self.need, self.takes, self.own, self.gives)


# A movement of tensors, or several movements of vectors.
Step = tuple[Decomposition, Decomposition] | FlatStages


def steps(source: Decomposition, target: Decomposition, node_of: NodeOf, me: int) -> list[Step]:
    """Steps that replace the movement from ``source`` to ``target``, in order.

    Empty if one direct movement is best. The steps are equal on all ranks, except that those of ``me``
    contain only its own lines. Sums in stages are summed within nodes first.
    """
    if target.partition.size == 1 and (collected := _to_one(source, target, node_of, me)):
        return [collected]
    if source.partition.size == 1 and (collected := _to_one(target, source, node_of, me)):
        return [collected.T]
    many, few = _takes_stages(target, source, node_of), _takes_stages(source, target, node_of)
    before: list[Step] = []
    after: list[Step] = []
    if many and (found := _from_few(target, source, node_of, me)):
        target, stage = found
        after = [stage]
    if few and (found := _from_few(source, target, node_of, me)):
        source, stage = found
        before = [stage.T]
    return [*before, (source, target), *after] if before or after else []


def _to_one(end: Decomposition, one: Decomposition, node_of: NodeOf, me: int) -> FlatStages | None:
    # Movement from many ranks to one, over one rank of each node; None if all may send to it directly.
    (root,) = one.partition.ranks
    line = end.partition.ranks if root in end.partition else (*end.partition.ranks, root)
    if len(trees.teams_of(line, node_of)) == 1 or not _cuts_lines(end, one, (line,)):
        return None
    own, need = end.box(me), one.box(me)
    boxes = [end.box(rank) for rank in line]
    stages, order = collecting(line, [box.volume for box in boxes], root, node_of, me)
    takes = tuple(boxes[at] for at in order) if me == root else (need,)
    return FlatStages(tuple(stages if me in line else ()), own, (own,), need, takes)


def _takes_stages(end: Decomposition, other: Decomposition, node_of: NodeOf) -> bool:
    # Whether ranks with replicas should not all communicate with each other, or one rank has a long vector
    # for several ranks on other nodes (or receives their sum).
    if not end.copied_along:
        return False
    lines = _lines(end)
    if any(len(trees.teams_of(line, node_of)) > 1 for line in lines):
        return True
    return end.partition.size > 3 * other.partition.size and any(
        len(set(map(node_of, line))) > 1 and end.box(line[0]).volume > _LONGEST_BROADCAST_WHOLE
        for line in lines
        if len(line) > 3
    )


def _lines(end: Decomposition) -> Groups:
    # Groups of ranks with the same box.
    return groups_along(end.partition, [g for g, axis in enumerate(end.axes) if axis is None])


def _from_few(
    end: Decomposition, other: Decomposition, node_of: NodeOf, me: int
) -> tuple[Decomposition, FlatStages] | None:
    # Decomposition close to ``other`` in which each line has every element once; stages to the replicas.
    lines = _lines(end)
    if other.partition.size <= len(lines):
        # ``other`` has at most one rank per line, which would send a message to every rank of the line.
        return _broadcast(end, other, lines, node_of, me)
    once = other if _cuts_lines(other, end, lines) else cut_copies(end, other)
    if once is None:
        return None
    line = next((line for line in lines if me in line), ())
    boxes = tuple(once.box(rank) for rank in line)
    stages, order = gathering(line, [box.volume for box in boxes], node_of, me)
    own = once.box(me)
    return once, FlatStages(tuple(stages), own, (own,), end.box(me), tuple(boxes[at] for at in order))


def _broadcast(
    end: Decomposition, other: Decomposition, lines: Groups, node_of: NodeOf, me: int
) -> tuple[Decomposition, FlatStages]:
    # The roots are the owners if each owner has the box of one line, and is in that line if the vector is
    # long; else they are the first ranks of the lines.
    boxes = [end.box(line[0]) for line in lines]
    owners = {other.box(rank): rank for rank in other.partition.ranks}
    roots = [owners.get(box, -1) for box in boxes]
    once, large = other, max(box.volume for box in boxes) > _LONGEST_BROADCAST_WHOLE
    elsewhere = large and any(root not in line for root, line in zip(roots, lines, strict=True))
    if elsewhere or min(roots) < 0 or len(set(roots)) < len(roots) or len(roots) < other.partition.size:
        once = end.one_copy()
        roots = [line[0] for line in lines]
    own, need = once.box(me), end.box(me)
    if large:
        mine = [pair for pair in zip(lines, roots, strict=True) if me in pair[0]]
        line, root = mine[0] if mine else ((), me)
        stages, order = _scatter_and_gather(line, root, need.volume, node_of, me)
        return once, FlatStages(tuple(stages), own, order if me == root else (own,), need, (need,))
    stages = trees.broadcast(roots, lines, [box.volume for box in boxes], node_of, me)
    return once, FlatStages(tuple(stages), own, (own,), need, (need,))


def _scatter_and_gather(
    line: Sequence[int], root: int, volume: int, node_of: NodeOf, me: int
) -> tuple[list[Stage], tuple[Box, ...]]:
    # Scatters shares of a long vector, and gathers them on all ranks: none sends more than about twice the
    # vector. The root arranges the shares, which lie in the order of the gather, in the order in which it
    # sends them.
    if len(line) < 2:
        return [], (Box.of_shape((volume,)),)
    _, order = gathering(line, [0] * len(line), node_of, me)
    shares = {at: Balanced(volume, len(line)).interval(place) for place, at in enumerate(order)}
    lengths = [stop - start for start, stop in (shares[at] for at in range(len(line)))]
    there, sent = collecting(line, lengths, root, node_of, me)
    back, _ = gathering(line, lengths, node_of, me)
    return [*trees.reversed_stages(there), *back], tuple(Box((shares[at],)) for at in sent)


def _cuts_lines(other: Decomposition, end: Decomposition, lines: Groups) -> bool:
    # Whether the ranks of each line have every element of the line once in ``other``, and nothing else.
    if other.copied_along or not {*other.partition.ranks} <= {*chain.from_iterable(lines)}:
        return False
    if not all(isinstance(split, (Balanced, Listed)) for split in other.splits):
        return False
    for line in lines:
        need = end.box(next(rank for rank in line if rank in end.partition))
        boxes = [other.box(rank) for rank in line]
        if sum(box.volume for box in boxes) != need.volume:
            return False
        if any(not box.empty and box & need != box for box in boxes):
            return False
    return True


def cut_copies(end: Decomposition, like: Decomposition) -> Decomposition | None:
    """The same boxes, each cut over the ranks that hold it; None if no dimension can be cut.

    Cuts the dimension in which ``like`` has most parts relative to ``end``.
    """
    candidates = [d for d, split in enumerate(end.splits) if isinstance(split, (Balanced, Listed))]
    if not candidates:
        return None

    def gain(d: int) -> tuple[float, float]:
        parts, extent = end.splits[d].parts, end.splits[d].extent
        return like.splits[d].parts / parts, extent / parts

    cut = max(candidates, key=gain)
    grid, P = end.axes.index(cut) if cut in end.axes else None, end.partition
    copied = [g for g, axis in enumerate(end.axes) if axis is None]
    inner = [*([] if grid is None else [grid]), *copied]
    outer = [g for g in range(P.dim) if g not in inner]
    # The grid dimension that cuts this tensor dimension and the replicating ones become one, the last.
    ranks = tuple(sorted(P.ranks, key=lambda rank: [P.index_of(rank)[g] for g in (*outer, *inner)]))
    copies = prod(P.shape[g] for g in copied)
    whole = end.splits[cut]
    lengths = [whole.interval(part) for part in range(whole.parts)]
    pieces = tuple(chain.from_iterable(Balanced(b - a, copies).lengths for a, b in lengths))
    shape = (*(P.shape[g] for g in outer), len(pieces))
    splits = tuple(Listed(pieces) if d == cut else split for d, split in enumerate(end.splits))
    axes = (*(end.axes[g] for g in outer), cut)
    return Decomposition(Partition(ranks, shape, P.me, P.home), splits, axes)


def gathering(
    line: Sequence[int], lengths: Sequence[int], node_of: NodeOf, me: int
) -> tuple[list[Stage], tuple[int, ...]]:
    """Stages of an all-gather of flat blocks over a line, and the order in which the blocks then lie.

    On each node, the ranks that have counterparts on all other nodes get the blocks of the node's other
    ranks. They exchange blocks with their counterparts, in several steps if there are many; then all ranks of
    a node do. So each element comes to a node once, and a rank has messages with its node and with O(log N)
    others of N nodes. The order is a tuple of positions in the line, equal on all ranks; the stages are those
    of ``me``, none if it is not in the line.
    """
    held: _Held = {rank: (at,) for at, rank in enumerate(line)}
    if len(line) < 2:
        return [], tuple(range(len(line)))
    return _gathering(tuple(line), held, lengths, node_of, me)


def collecting(
    line: Sequence[int], lengths: Sequence[int], root: int, node_of: NodeOf, me: int
) -> tuple[list[Stage], tuple[int, ...]]:
    """Stages of a gather of flat blocks to ``root``, and the order in which the blocks then lie there.

    The stages lead over one rank of each node, or of a few nodes. Otherwise as :func:`gathering`.
    """
    held: _Held = {rank: (at,) for at, rank in enumerate(line)}
    group, stages = tuple(line), []
    while len(group) > 1:
        teams = trees.teams_of(group, node_of)
        led = leaders(teams, root)
        mine = next((at for at, team in enumerate(teams) if me in team), 0)
        stages.append(_fold(teams[mine], (led[mine],), held, lengths, me))
        held = {
            leader: tuple(chain.from_iterable(held[rank] for rank in team))
            for leader, team in zip(led, teams, strict=True)
        }
        group = led
    return stages, held[group[0]]


# By rank: the positions in the line of the blocks that it holds, in their order there.
_Held = dict[int, tuple[int, ...]]


def _gathering(
    line: tuple[int, ...], held: _Held, lengths: Sequence[int], node_of: NodeOf, me: int
) -> tuple[list[Stage], tuple[int, ...]]:
    teams = trees.teams_of(line, node_of)
    if len(teams) == 1:
        return [_all_gather(line, held, lengths, me)], tuple(chain.from_iterable(held[r] for r in line))
    holders, mine = share_holders(teams), next((team for team in teams if me in team), teams[0])
    stages = []
    if holders != teams:
        stages.append(_fold(mine, holders[teams.index(mine)], held, lengths, me))
        # The other ranks give their blocks to the holders in turn.
        held = {
            holder: tuple(chain.from_iterable(held[rank] for rank in team[at :: len(some)]))
            for team, some in zip(teams, holders, strict=True)
            for at, holder in enumerate(some)
        }
    known: _Held = dict.fromkeys(mine, ())
    across: list[Stage] = []
    for number, counterparts in enumerate(zip(*holders, strict=True)):
        found, order = _gathering(counterparts, held, lengths, node_of, me)
        known |= dict.fromkeys(counterparts, order)
        # A rank that is no holder plans the stages of the first counterparts, in which it takes no part.
        if number == 0 or me in counterparts:
            across = found
    stages += [*across, _all_gather(mine, known, lengths, me)]
    return stages, tuple(chain.from_iterable(known[rank] for rank in holders[0]))


def _fold(team: Sequence[int], holders: Sequence[int], held: _Held, lengths: Sequence[int], me: int) -> Stage:
    turns = list(zip(holders, (team[at :: len(holders)] for at in range(len(holders))), strict=True))
    ranks = tuple(chain.from_iterable(turn for _, turn in turns))
    before = tuple(_length(held[rank], lengths) for rank in ranks)
    sums = {holder: sum(_length(held[rank], lengths) for rank in turn) for holder, turn in turns}
    after = tuple(sums.get(rank, 0) for rank in ranks)
    return trees.flat((ranks,), Listed(before), me), trees.flat((ranks,), Listed(after), me)


def _all_gather(team: Sequence[int], held: _Held, lengths: Sequence[int], me: int) -> Stage:
    blocks = trees.flat((tuple(team),), Listed(tuple(_length(held[rank], lengths) for rank in team)), me)
    return blocks, Decomposition.replicated(blocks.partition, blocks.shape)


def _length(blocks: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[at] for at in blocks)

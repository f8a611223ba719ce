"""Movements to copies, and their adjoints, in stages: by way of the nodes, with few messages per rank.

Where the ranks along some grid dimensions of the target hold copies, on several nodes, each of these *lines*
of ranks first gets every element once, and then its ranks tell each other what they have. What several ranks
have that is summed goes the same way backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from distdl_rma.geometry import trees
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.rank_groups import Groups, groups_along, share_holders
from distdl_rma.geometry.trees import NodeOf, Stage


@dataclass(frozen=True)
class FlatStages:
    """Movements of flat vectors that follow one another, and where their elements are in the tensors.

    A rank puts in the boxes of ``gives``, and gets those of ``takes``, one behind the other; they fill the
    tensors that the rank has before and after, whose boxes are ``own`` and ``need``.
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


# A movement of tensors, or several of vectors.
Step = tuple[Decomposition, Decomposition] | FlatStages


def steps(source: Decomposition, target: Decomposition, node_of: NodeOf, me: int) -> list[Step]:
    """What follows one another in place of the movement from ``source`` to ``target``.

    Empty if that is best done at once. Alike on all ranks, but that ``me`` sees only the lines that it is in.
    Sums that are made in stages are those of the nodes first.
    """
    many, few = _copies_on_nodes(target, node_of), _copies_on_nodes(source, node_of)
    if not (many or few):
        return []
    before: list[Step] = []
    after: list[Step] = []
    if many and (found := _from_few(target, source, node_of, me)):
        target, stage = found
        after = [stage]
    if few and (found := _from_few(source, target, node_of, me)):
        source, stage = found
        before = [stage.T]
    if not (before or after):
        return []
    return [*before, (source, target), *after]


def _copies_on_nodes(end: Decomposition, node_of: NodeOf) -> bool:
    # Whether copies are on ranks that should not all talk to each other.
    if not end.copied_along:
        return False
    return any(len(trees.teams_of(line, node_of)) > 1 for line in _lines(end))


def _lines(end: Decomposition) -> Groups:
    # Ranks with the same box.
    return groups_along(end.partition, [g for g, axis in enumerate(end.axes) if axis is None])


def _from_few(
    end: Decomposition, other: Decomposition, node_of: NodeOf, me: int
) -> tuple[Decomposition, FlatStages] | None:
    # Who has each element once before the copies are made, as near to the other end as it can be.
    lines = _lines(end)
    if other.partition.size <= len(lines):
        # One rank of each line has it, and would send as many messages as there are others.
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
    # Roots are the owners themselves where each has what one line needs.
    boxes = [end.box(line[0]) for line in lines]
    owners = {other.box(rank): rank for rank in other.partition.ranks}
    roots = [owners.get(box, -1) for box in boxes]
    once = other
    if min(roots) < 0 or len(set(roots)) < len(roots) or len(roots) < other.partition.size:
        once = end.one_copy()
        roots = [line[0] for line in lines]
    lengths = [box.volume for box in boxes]
    stages = trees.broadcast(roots, lines, lengths, node_of, me)
    own, need = once.box(me), end.box(me)
    return once, FlatStages(tuple(stages), own, (own,), need, (need,))


def _cuts_lines(other: Decomposition, end: Decomposition, lines: Groups) -> bool:
    # Whether the ranks of each line have all that the line needs once, and nothing else.
    if other.copied_along or set(other.partition.ranks) != set(end.partition.ranks):
        return False
    if not all(isinstance(split, (Balanced, Listed)) for split in other.splits):
        return False
    for line in lines:
        need = end.box(line[0])
        boxes = [other.box(rank) for rank in line]
        if sum(box.volume for box in boxes) != need.volume:
            return False
        if any(not box.empty and box & need != box for box in boxes):
            return False
    return True


def cut_copies(end: Decomposition, like: Decomposition) -> Decomposition | None:
    """The same boxes, each cut over the ranks that hold copies of it; None if no dimension can be cut.

    In the dimension in which ``like`` has most parts beside it.
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
    # The dimensions of the grid that cut this one of the tensor become one, behind the others.
    ranks = tuple(
        P.rank_at([places[g] for g in range(P.dim)])
        for places in (
            dict(zip((*outer, *inner), index, strict=True))
            for index in product(*(range(P.shape[g]) for g in (*outer, *inner)))
        )
    )
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
    """How flat blocks of some ranks come to all of them, and in which order the blocks then lie there.

    On every node those ranks that have counterparts on all the others get the blocks of the rest; they hear
    from their counterparts, a few at a time where these are many, and then all on a node hear from each
    other. So each element comes to a node once, and each rank has messages with its node, and with O(log N)
    others of N nodes. The order is that of positions in the line, and alike on all ranks; the stages are
    those of ``me``, none if it is not in the line.
    """
    held: _Held = {rank: (at,) for at, rank in enumerate(line)}
    if len(line) < 2:
        return [], tuple(range(len(line)))
    return _gathering(tuple(line), held, lengths, node_of, me)


# Which blocks a rank holds, by position in the line, in their order there.
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
        held = dict(chain.from_iterable(_folded(*each, held) for each in zip(teams, holders, strict=True)))
    known: _Held = dict.fromkeys(mine, ())
    across: list[Stage] = []
    for number, counterparts in enumerate(zip(*holders, strict=True)):
        found, order = _gathering(counterparts, held, lengths, node_of, me)
        known |= dict.fromkeys(counterparts, order)
        # Whoever has none of them takes no part in what the first ones do.
        if number == 0 or me in counterparts:
            across = found
    stages += [*across, _all_gather(mine, known, lengths, me)]
    return stages, tuple(chain.from_iterable(known[rank] for rank in holders[0]))


def _folded(
    team: Sequence[int], holders: Sequence[int], held: _Held
) -> Iterator[tuple[int, tuple[int, ...]]]:
    # Those that hold nothing afterwards give their blocks to the holders in turn.
    for at, holder in enumerate(holders):
        yield holder, tuple(chain.from_iterable(held[rank] for rank in team[at :: len(holders)]))


def _fold(team: Sequence[int], holders: Sequence[int], held: _Held, lengths: Sequence[int], me: int) -> Stage:
    turns = [team[at :: len(holders)] for at in range(len(holders))]
    ranks = tuple(chain.from_iterable(turns))
    before = [_length(held[rank], lengths) for rank in ranks]
    after = chain.from_iterable(
        (sum(_length(held[rank], lengths) for rank in turn), *[0] * (len(turn) - 1)) for turn in turns
    )
    return _flat(ranks, before, me), _flat(ranks, list(after), me)


def _all_gather(team: Sequence[int], held: _Held, lengths: Sequence[int], me: int) -> Stage:
    blocks = _flat(team, [_length(held[rank], lengths) for rank in team], me)
    return blocks, Decomposition.replicated(blocks.partition, blocks.shape)


def _length(blocks: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[at] for at in blocks)


def _flat(ranks: Sequence[int], lengths: Sequence[int], me: int) -> Decomposition:
    return Decomposition(Partition(tuple(ranks), (len(ranks),), me), (Listed(tuple(lengths)),), (0,))

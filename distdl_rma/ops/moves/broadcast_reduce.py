"""Subtensors that are copied to groups of ranks, or summed over them: broadcast and sum-reductions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import zip_longest
from math import prod

import torch

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry import trees
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.rank_groups import Groups, groups_along, groups_onto
from distdl_rma.geometry.trees import NodeOf, Stage
from distdl_rma.ops.core.movement import CallSite, movements_through
from distdl_rma.ops.moves.redistribute import StagedMove

# Who has what of a tensor, where what is summed are copies; or the local shapes of subtensors that are no
# blocks of one tensor, by rank id.
Subtensors = Decomposition | Mapping[int, tuple[int, ...]]


def _between_grids(
    site: CallSite,
    source: Subtensors,
    P_x: Partition,
    P_y: Partition,
    dtype: torch.dtype,
    flips: tuple[bool, bool] = (False, False),
    *,
    sums: bool,
) -> StagedMove:
    # Flips say of P_x and of P_y whether they are transposed before.
    many, few = ((P_x, flips[0]), (P_y, flips[1]))[:: 1 if sums else -1]
    groups, roots = groups_onto(many[0], few[0], many[1], few[1]), few[0].ranks
    alone = tuple((root,) for root in roots)

    def stages(lengths: list[int], node_of: NodeOf) -> list[Stage]:
        me = site.machine.rank
        if sums:
            return trees.reduction(groups, roots, lengths, node_of, me)
        return trees.broadcast(roots, groups, lengths, node_of, me)

    givers, takers = (groups, alone) if sums else (alone, groups)
    return _staged(site, source, givers, takers, _onto(source, P_y, flips), dtype, stages)


# Sum subtensors from P_x to P_y, in the order of P_x, along the dimensions in which the grid of P_y is 1.
sum_reduce = partial(_between_grids, sums=True)
# Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.
broadcast = partial(_between_grids, sums=False)


def all_sum_reduce(
    site: CallSite, source: Subtensors, P_x: Partition, axes: Collection[int], dtype: torch.dtype
) -> StagedMove:
    """Sum subtensors along dimensions of the grid, to all ranks that they come from; bitwise alike there."""
    groups = groups_along(P_x, axes)

    def stages(lengths: list[int], node_of: NodeOf) -> list[Stage]:
        return trees.all_reduction(groups, lengths, node_of, site.machine.rank)

    output = source if isinstance(source, Decomposition) else None
    return _staged(site, source, groups, groups, output, dtype, stages)


def _onto(source: Subtensors, P_y: Partition, flips: tuple[bool, bool]) -> Decomposition | None:
    # Grids are aligned at the right; a dimension of P_y cuts what that of P_x in its place cuts.
    if not isinstance(source, Decomposition):
        return None
    (flip_x, flip_y), P_x = flips, source.partition
    cuts = list(zip(source.axes, P_x.shape, strict=True))[:: 1 if flip_x else -1]
    grid = P_y.shape[:: 1 if flip_y else -1]
    axes = [
        cut[0] if cut is not None and cut[1] == extent else None
        for cut, extent in zip_longest(cuts[: P_y.dim], grid)
    ]
    return Decomposition(P_y, source.splits, tuple(axes[:: 1 if flip_y else -1]))


def _staged(
    site: CallSite,
    source: Subtensors,
    givers: Groups,
    takers: Groups,
    output: Decomposition | None,
    dtype: torch.dtype,
    stages: Callable[[list[int], NodeOf], list[Stage]],
) -> StagedMove:
    # Givers and takers are the ranks that have, and that get, the subtensor of each group.
    machine = site.machine
    subtensors = [_common_shape(group, source) for group in givers]
    of_taker = {rank: shape for group, shape in zip(takers, subtensors, strict=True) for rank in group}
    nodes = machine.segments.segment.nodes
    node_of = {member: number for number, node in enumerate(nodes) for member in node}
    found = stages([prod(shape) for shape in subtensors], node_of.__getitem__)
    # Where sums are summed again, short types travel in a longer one: they are rounded once, at the end.
    sums = len(found) > (2 if givers is takers else 1)
    movements = movements_through(site, found, sum_dtype(dtype) if sums else dtype)
    return StagedMove(movements, dtype, output, of_taker.get(machine.rank, (0,)))


def _common_shape(group: Collection[int], source: Subtensors) -> tuple[int, ...]:
    if isinstance(source, Decomposition):
        shapes = {rank: source.box(rank).shape for rank in group}
    else:
        shapes = {rank: source[rank] for rank in group}
    (first, expected), *others = shapes.items()
    for rank, shape in others:
        if shape != expected:
            raise ShapeError(
                f"subtensors that are summed must be equal in shape: rank {first} passes {expected}"
                f" but rank {rank} {shape}"
            )
    return expected

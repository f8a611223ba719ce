"""Subtensors that are copied to groups of ranks, or summed over them: broadcast and sum-reductions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry import trees
from distdl_rma.geometry.rank_groups import Groups
from distdl_rma.geometry.trees import NodeOf, Stage
from distdl_rma.ops.core.movement import CallSite, movements_through
from distdl_rma.ops.core.tensors import sum_dtype
from distdl_rma.ops.moves.staged import StagedMove

# Local shape of each rank that has a subtensor.
_Shapes = Mapping[int, tuple[int, ...]]


def broadcast(
    site: CallSite, roots: Sequence[int], groups: Groups, shapes: _Shapes, dtype: torch.dtype
) -> StagedMove:
    """Copy the subtensor of each root to the ranks of its group."""

    def stages(lengths: list[int], node_of: NodeOf) -> list[Stage]:
        return trees.broadcast(roots, groups, lengths, node_of, site.machine.rank)

    return _staged(site, tuple((root,) for root in roots), groups, shapes, dtype, stages)


def sum_reduce(
    site: CallSite, groups: Groups, roots: Sequence[int], shapes: _Shapes, dtype: torch.dtype
) -> StagedMove:
    """Sum the subtensors of each group, in its order, to its root, which need not be a member."""

    def stages(lengths: list[int], node_of: NodeOf) -> list[Stage]:
        return trees.reduction(groups, roots, lengths, node_of, site.machine.rank)

    return _staged(site, groups, tuple((root,) for root in roots), shapes, dtype, stages)


def all_sum_reduce(site: CallSite, groups: Groups, shapes: _Shapes, dtype: torch.dtype) -> StagedMove:
    """Sum the subtensors of each group to all its ranks; bitwise alike on them."""

    def stages(lengths: list[int], node_of: NodeOf) -> list[Stage]:
        return trees.all_reduction(groups, lengths, node_of, site.machine.rank)

    return _staged(site, groups, groups, shapes, dtype, stages)


def _staged(
    site: CallSite,
    givers: Groups,
    takers: Groups,
    shapes: _Shapes,
    dtype: torch.dtype,
    stages: Callable[[list[int], NodeOf], list[Stage]],
) -> StagedMove:
    # Givers and takers are the ranks that have, and that get, the subtensor of each group.
    machine = site.machine
    subtensors = [_common_shape(group, shapes) for group in givers]
    of_taker = {rank: shape for group, shape in zip(takers, subtensors, strict=True) for rank in group}
    nodes = machine.segments.segment.nodes
    node_of = {member: number for number, node in enumerate(nodes) for member in node}
    found = stages([prod(shape) for shape in subtensors], node_of.__getitem__)
    # Where sums are summed again, short types travel in a longer one: they are rounded once, at the end.
    sums = len(found) > (2 if givers is takers else 1)
    movements = movements_through(site, found, sum_dtype(dtype) if sums else dtype)
    return StagedMove(movements, dtype, None, of_taker.get(machine.rank, (0,)))


def _common_shape(group: Collection[int], shapes: _Shapes) -> tuple[int, ...]:
    first, *others = group
    for rank in others:
        if shapes[rank] != shapes[first]:
            raise ShapeError(
                f"subtensors that are summed must be equal in shape: rank {first} passes {shapes[first]}"
                f" but rank {rank} {shapes[rank]}"
            )
    return shapes[first]

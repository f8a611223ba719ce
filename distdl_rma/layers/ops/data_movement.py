"""Operations that move tensors: repartition, halo exchange, concatenation, broadcast and sum-reduction.

Two kinds of operands. A *tensor* has a decomposition, and every movement of it is an exchange between two of
them::

    redistribution   blocks, or terms of a sum ->  other blocks of the tensor
    halo exchange    blocks                    ->  blocks with the elements around them

*Subtensors* are any tensors, one on each rank, that need not be blocks of one: they are summed or copied
along grid dimensions as vectors. With many ranks that goes along a tree of stages, within nodes first
(``geometry/trees.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from itertools import zip_longest
from math import prod

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry import trees
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window, WindowSplit
from distdl_rma.geometry.intervals import Section
from distdl_rma.geometry.partition import Groups, Partition, alike, groups_along, groups_onto
from distdl_rma.geometry.trees import NodeOf, Stage
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite, movements_through
from distdl_rma.layers.ops.core.operation import Operation
from distdl_rma.layers.ops.core.staged import Moves, movement_between, movement_or_none
from distdl_rma.layers.ops.window_gather import WindowGather


class StagedMove(Operation):
    """One or more movements, one after another; the result is in new memory.

    As an operation, for a layer: it takes no part in computing.

    ``dtype`` is the type of the result; the movements may have a longer one. ``flat`` is the local shape of
    the result if the movements move flattened tensors, else None.
    """

    def __init__(
        self,
        movements: Sequence[Moves],
        dtype: torch.dtype,
        output: Decomposition | None,
        flat: tuple[int, ...] | None = None,
    ) -> None:
        self._stages, self.dtype, self.output, self._flat = tuple(movements), dtype, output, flat

    def __call__(self, needs: GradientNeeds, x: torch.Tensor) -> torch.Tensor:
        """Local result of a local shard; blocking."""
        y = x if self._flat is None else x.reshape(-1)
        for movement in self._stages:
            # A tensor without elements may have any type.
            y = movement(y.to(movement.dtype) if y.numel() else y, needs.input)
        y = y.to(self.dtype)
        return y if self._flat is None else y.reshape(self._flat)

    def movements(self) -> tuple[Moves, ...]:
        """All stages."""
        return self._stages


def redistribution(
    site: CallSite, source: Decomposition, target: Decomposition, dtype: torch.dtype
) -> StagedMove:
    """Move from any decomposition to any other: elements of several owners are summed."""
    return StagedMove([movement_between(site, source, target, dtype)], dtype, target)


class HaloExchange(StagedMove):
    """Block of each rank with the elements around it: overlapping parts of the padded tensor.

    ``width`` is the number of elements before and after a block, for each spatial dimension; mode and value
    as in :class:`WindowGather`.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        dtype: torch.dtype,
        width: tuple[tuple[int, int], ...],
        mode: str,
        value: float,
    ) -> None:
        stencil = Stencil(tuple(Window(a + b + 1, left=a, right=b) for a, b in width))
        self._gather = WindowGather(site, stencil, source, source, dtype, mode, value)
        gather = self._gather.movement
        # The result is in new memory even where a rank receives nothing.
        movements = [gather] if gather is not None else movements_through(site, [(source, source)], dtype)
        # In coordinates of the padded tensor, a window begins where its block does, and needs no padding.
        padded = {
            d: WindowSplit(source.splits[d], Window(a + b + 1), source.shape[d] + a + b)
            for d, (a, b) in enumerate(width, LEADING)
        }
        super().__init__(movements, dtype, source.with_splits(padded))

    def __call__(self, needs: GradientNeeds, x: torch.Tensor) -> torch.Tensor:
        """Own block with the elements around it; blocking."""
        return self._gather.add_padding(super().__call__(needs, x))


CHANNELS = 1


class Concat(Operation):
    """Concatenation along the channels; each input, and its gradient, travels in its own type.

    An input goes straight to the place of its channels on the ranks of the output: nobody has the whole
    tensor. Two inputs of 3 and 5 channels, output on two ranks::

        output    rank 0  channels 0 1 2 3      rank 1  channels 4 5 6 7
        input 0           0 1 2                                            a section of the output's channels
        input 1                 0                       1 2 3 4

    ``sources`` and ``dtypes`` are the decomposition and the type of each input. The result is balanced on
    P_y; if that is the partition of the first input, the batch keeps the cut of this. If all inputs are on
    P_y, which cuts no channels, all dimensions do, so that nothing moves where inputs are cut alike.
    """

    output: Decomposition

    def __init__(
        self, site: CallSite, sources: Sequence[Decomposition], dtypes: Sequence[torch.dtype], P_y: Partition
    ) -> None:
        shape, self.dtype = joined([source.shape for source in sources], dtypes)
        target, first = Decomposition.balanced(P_y, shape), sources[0]
        stays = P_y.shape[CHANNELS] == 1 and all(source.partition == P_y for source in sources)
        if stays:
            target = first.with_splits({CHANNELS: target.splits[CHANNELS]})
        elif first.partition == P_y:
            target = target.with_splits({0: first.splits[0]})
        self.output, offset = target, 0
        self._movements: list[Moves | None] = []
        self._shapes: list[tuple[int, ...]] = []
        for at, (source, dtype) in enumerate(zip(sources, dtypes, strict=True)):
            channels = Section(target.splits[CHANNELS], offset, source.shape[CHANNELS])
            part = target.with_splits({CHANNELS: channels})
            offset += channels.extent
            self._movements.append(movement_or_none(site, source, part, dtype, f"input {at}"))
            self._shapes.append(part.box(site.machine.rank).shape)

    def movements(self) -> list[Moves | None]:
        """Movement of each input."""
        return self._movements

    def __call__(self, needs: GradientNeeds, *inputs: torch.Tensor) -> torch.Tensor:
        """Block of the concatenated tensor, in new memory; blocking."""
        # All movements start before the first wait, also in the backward.
        requests = [
            None if movement is None else movement.start(x, needed)
            for movement, x, needed in zip(self._movements, inputs, needs.inputs, strict=True)
        ]
        parts = []
        for request, x, shape in zip(requests, inputs, self._shapes, strict=True):
            part = (x if request is None else request.movement.wait(request)).to(self.dtype)
            # An input without elements may have any shape.
            parts.append(part if part.numel() else part.reshape(shape))
        return torch.cat(parts, CHANNELS)


def joined(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a concatenation along the channels; ``ShapeError`` with torch's reason if none."""
    kinds = list(zip(shapes, dtypes, strict=True))
    try:
        y = torch.cat([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds], CHANNELS)
        return tuple(y.shape), reduce(torch.promote_types, dtypes)
    except (RuntimeError, TypeError) as error:
        given = "; ".join(f"input {at} is {shape} of {dtype}" for at, (shape, dtype) in enumerate(kinds))
        raise ShapeError(f"{error}; {given}") from None


# Decomposition of a tensor, whose replicas are the terms of sums; or, by rank id, the local shapes of
# subtensors that are no blocks of one tensor.
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
    # flips: whether the grids of P_x and of P_y are transposed first.
    many, few = ((P_x, flips[0]), (P_y, flips[1]))[:: 1 if sums else -1]
    groups, roots = groups_onto(many[0], few[0], many[1], few[1]), few[0].ranks
    alone = tuple((root,) for root in roots)
    givers, takers = (groups, alone) if sums else (alone, groups)
    stages = partial(trees.reduction, groups, roots) if sums else partial(trees.broadcast, roots, groups)
    return _staged(site, source, givers, takers, _onto(source, P_y, flips), dtype, stages)


# Sum subtensors from P_x to P_y, in the order of P_x, along the dimensions in which the grid of P_y is 1.
sum_reduce = partial(_between_grids, sums=True)
# Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.
broadcast = partial(_between_grids, sums=False)


def all_sum_reduce(
    site: CallSite, source: Subtensors, P_x: Partition, axes: Collection[int], dtype: torch.dtype
) -> StagedMove:
    """Sum subtensors along dimensions of the grid, on all ranks that have one; bitwise equal results."""
    groups, output = groups_along(P_x, axes), source if isinstance(source, Decomposition) else None
    return _staged(site, source, groups, groups, output, dtype, partial(trees.all_reduction, groups))


def _onto(source: Subtensors, P_y: Partition, flips: tuple[bool, bool]) -> Decomposition | None:
    # Grids are aligned at the right: a dimension of P_y cuts the same tensor dimension as its counterpart.
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
    stages: Callable[[list[int], NodeOf, int], list[Stage]],
) -> StagedMove:
    # givers and takers: per group, the ranks that have its subtensor, and the ranks that get it.
    machine = site.machine
    subtensors = [_common_shape(group, source) for group in givers]
    of_taker = {rank: shape for group, shape in zip(takers, subtensors, strict=True) for rank in group}
    nodes = machine.segments.segment.nodes
    node_of = {member: number for number, node in enumerate(nodes) for member in node}
    found = stages([prod(shape) for shape in subtensors], node_of.__getitem__, machine.rank)
    # Where sums are summed again, short types travel in a longer type: they are rounded once, at the end.
    sums = len(found) > (2 if givers is takers else 1)
    movements = movements_through(site, found, sum_dtype(dtype) if sums else dtype)
    return StagedMove(movements, dtype, output, of_taker.get(machine.rank, (0,)))


def _common_shape(group: Collection[int], source: Subtensors) -> tuple[int, ...]:
    shapes = {
        rank: source.box(rank).shape if isinstance(source, Decomposition) else source[rank] for rank in group
    }
    text = "subtensors that are summed must be equal in shape: rank {} passes {} but rank {} {}"
    return alike(shapes, text)

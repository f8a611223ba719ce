"""Concatenation of tensors that are cut differently: each moves to where it is in the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Section
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.staged import Moves, movement_or_none

CHANNELS = 1


class Concat(Operation):
    """Concatenation along the channels; each input travels in its own type, and so does its gradient.

    ``sources`` and ``dtypes`` say who owns what of each input, and its type. The result is balanced on P_y;
    with ``keep_batch`` the batch stays cut as that of the first input.
    """

    output: Decomposition

    def __init__(
        self,
        site: CallSite,
        sources: Sequence[Decomposition],
        dtypes: Sequence[torch.dtype],
        P_y: Partition,
        keep_batch: bool,
    ) -> None:
        shape, self.dtype = joined([source.shape for source in sources], dtypes, P_y.dim)
        target = Decomposition.balanced(P_y, shape)
        if keep_batch:
            target = target.with_splits({0: sources[0].splits[0]})
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
        """One for each input."""
        return self._movements

    def __call__(self, needs: GradientNeeds, *inputs: torch.Tensor) -> torch.Tensor:
        """Block of the concatenated tensor, in memory of its own; blocking."""
        # All are under way before the first is waited for; backward does the same.
        requests = [
            None if movement is None else movement.start(x, needed)
            for movement, x, needed in zip(self._movements, inputs, needs.inputs, strict=True)
        ]
        parts = []
        for request, x, shape in zip(requests, inputs, self._shapes, strict=True):
            part = (x if request is None else request.movement.wait(request)).to(self.dtype)
            # What has no elements came in any shape.
            parts.append(part if part.numel() else part.reshape(shape))
        if self.output.partition.active:
            return torch.cat(parts, CHANNELS)
        return torch.cat([part.reshape(-1) for part in parts])


def joined(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], dim: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a concatenation along the channels.

    ``ShapeError`` if an input has another number of dimensions than ``dim``, another extent than the first
    in a dimension that is not that of the channels, or a type that torch does not promote.
    """
    first, joint = shapes[0], dtypes[0]
    for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if len(shape) != dim:
            raise ShapeError(f"input {at} has {len(shape)} dimensions, shape {shape}, the partitions {dim}")
        if dtype != joint:
            try:
                joint = torch.promote_types(joint, dtype)
            except RuntimeError as error:
                raise ShapeError(f"input 0 is {dtypes[0]} but input {at} is {dtype}: {error}") from None
        differs = [d for d, n in enumerate(shape) if d != CHANNELS and n != first[d]]
        if differs:
            raise ShapeError(
                f"input 0 has shape {first} but input {at} {shape}, which must agree in dimension"
                f" {differs[0]}"
            )
    return (first[0], sum(shape[CHANNELS] for shape in shapes), *first[CHANNELS + 1 :]), joint

"""Padding: every rank fetches what its part of the padded tensor shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.ops.window_gather import WindowGather
from distdl_rma.ops.windows.window_operation import WindowOperation

# Modes in which torch lets all dimensions end without elements; some of them may in every mode.
_MAY_BE_EMPTY = ("zeros", "constant", "circular")
# Modes in which torch crops before it pads, and so cannot crop more than there is.
_CROP_FIRST = ("zeros", "constant")


@dataclass(frozen=True)
class PadOptions:
    """Left and right padding of each spatial dimension, negative ones crop; mode as of ``WindowGather``."""

    sides: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    value: float = 0.0

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of the output."""
        extents, sides, mode = shape[LEADING:], self.sides, self.mode
        padded = tuple(n + left + right for n, (left, right) in zip(extents, sides, strict=True))
        cropped = [-min(left, 0) - min(right, 0) for left, right in sides]
        too_few = mode in _CROP_FIRST and any(c > n for c, n in zip(cropped, extents, strict=True))
        if too_few or min(padded) < 0 or (max(padded) < 1 and mode not in _MAY_BE_EMPTY):
            # torch's order: the last dimension first.
            given = tuple(side for pair in reversed(sides) for side in pair)
            raise ShapeError(f"padding {given} leaves {padded} of the global input {extents}")
        return padded


class Padding(WindowOperation[PadOptions]):
    """Padding that is no other element's copy is added where it is; everything else is moved."""

    inexact = False

    def _prepare(self, source: Decomposition, options: PadOptions) -> None:
        stencil = Stencil(tuple(Window(1, left=left, right=right) for left, right in options.sides))
        kind = self.dtype, options.mode, options.value
        self._read = WindowGather(self.site, stencil, source, self.output, *kind)
        self.gather = self._read.movement

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        y = self._read.add_padding(x)
        # Where nothing had to move, the result would be the input itself.
        return y.clone() if self.gather is None else y

"""Which element of each window is the largest: what max pooling hands on, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.box import LEADING
from distdl_rma.ops.windows.window_operation import T, WindowOperation

_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

Coordinates = Sequence[torch.Tensor]


class MaxWindows(WindowOperation[T]):
    """The largest element of each window; the gradient goes to where it was.

    Subclasses say where that is, and set where what they gather starts, and whether ``return_indices`` was
    asked for.
    """

    start: Sequence[int]
    return_indices: bool
    _indices: torch.Tensor | None = None

    def _argmax(self, x: torch.Tensor) -> Coordinates:
        """Global coordinates of the largest elements, one tensor per spatial dimension."""
        raise NotImplementedError

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        found = self._argmax(x.detach())
        if self.return_indices:
            self._indices = flat_index(found, self.extents)
        return gather_at(x, [at - first for at, first in zip(found, self.start, strict=True)])

    def take_indices(self) -> torch.Tensor | None:
        """Positions in the global plane, flattened, of what the last call returned; None without elements."""
        indices, self._indices = self._indices, None
        return indices


def argmax_windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Coordinates:
    """Coordinates of the largest element of each sliding window, one tensor per spatial dimension.

    Of several equal ones the first counts, as in torch; NaN is larger than all numbers.
    """
    spatial = x.shape[LEADING:]
    with torch.no_grad():
        pool = _POOLS[len(spatial)]
        _, index = pool(x.detach(), kernel, stride, padding=0, dilation=dilation, return_indices=True)
        return torch.unravel_index(index, spatial)


def flat_index(coordinates: Coordinates, shape: Sequence[int]) -> torch.Tensor:
    """Row-major index of coordinates in an array of the given shape."""
    index = torch.zeros_like(coordinates[0])
    for extent, coordinate in zip(shape, coordinates, strict=True):
        index = index * extent + coordinate
    return index


def gather_at(x: torch.Tensor, coordinates: Coordinates) -> torch.Tensor:
    """Elements of ``x`` at some coordinates of its spatial dimensions; the gradient goes back to them."""
    index = flat_index(coordinates, x.shape[LEADING:])
    return x.flatten(LEADING).gather(LEADING, index.flatten(LEADING)).view(index.shape)

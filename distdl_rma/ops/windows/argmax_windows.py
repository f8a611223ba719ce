"""Which element of each window is the largest: what max pooling hands on, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.box import LEADING

_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

Coordinates = tuple[torch.Tensor, ...]


def argmax_windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Coordinates:
    """Coordinates of the largest element of each window of ``x``, one tensor per spatial dimension.

    Of several equal ones the first counts, as in torch; NaN is larger than all numbers.
    """
    spatial = x.shape[LEADING:]
    with torch.no_grad():
        _, index = _POOLS[len(spatial)](
            x.detach(), kernel, stride, padding=0, dilation=dilation, return_indices=True
        )
        return torch.unravel_index(index, spatial)


def flat_index(coordinates: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Row-major index of coordinates in an array of the given shape."""
    index = torch.zeros_like(coordinates[0])
    for extent, coordinate in zip(shape, coordinates, strict=True):
        index = index * extent + coordinate
    return index


def gather_at(x: torch.Tensor, coordinates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements of ``x`` at some coordinates of its spatial dimensions; the gradient goes back to them."""
    index = flat_index(coordinates, x.shape[LEADING:])
    return x.flatten(LEADING).gather(LEADING, index.flatten(LEADING)).view(index.shape)

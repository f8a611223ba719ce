"""Inputs that the outputs of a sliding window read: moved from their owners, padded beyond the domain.

Windows of 3 with padding 1, and three ranks with 3 inputs each. What the padding holds decides who needs
whom::

    inputs                     |0 1 2|3 4 5|6 7 8|
    zeros, constant        - 0  1 2 3                    rank 0 reads element 3; it makes the padding
    replicate              0 0  1 2 3                    ... and repeats its element 0
    reflect                1 0  1 2 3                    ... and repeats its element 1
    circular               8 0  1 2 3                    ... and reads element 8 of rank 2: an image of the
                                                         whole input, shifted by its extent

So the halo, the copies of a circular padding, and a redistribution to another grid are one exchange, from the
blocks of the input to the boxes that outputs read. What the exchange does not bring is added by
``add_padding``.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import InnerSplit, Stencil
from distdl_rma.geometry.intervals import Split
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import movement_or_none

# torch's padding modes.
PADDING_MODES = ("zeros", "constant", "reflect", "replicate", "circular")


class WindowGather:
    """Inputs that this rank's outputs read, in one movement: halo, redistribution, copies and padding.

    ``source`` is the decomposition of the input (batch, channel, *spatial). ``outputs`` is the decomposition
    of the outputs in space, and of the inputs that they read in batch and channels. ``value`` is the value of
    a constant padding. ``region`` is the box that this rank reads in space, padding included; ``held`` is the
    part that the movement brings, all of it if ``complete``. ``ShapeError`` if the padding is wider than the
    mode allows for this global input, or if ``value`` is no value of the type.
    """

    def __init__(
        self,
        site: CallSite,
        stencil: Stencil,
        source: Decomposition,
        outputs: Decomposition,
        dtype: torch.dtype,
        mode: str = "zeros",
        value: float = 0.0,
    ) -> None:
        extents = source.shape[LEADING:]
        _check(stencil, extents, mode)
        if mode == "constant":
            _check_value(value, dtype)
        self.mode, self.value, self.extents = mode, value, extents
        reads = dict(enumerate(stencil.with_halo(outputs.splits[LEADING:], extents), LEADING))
        inner = mode in ("constant", "reflect", "replicate")
        needs: dict[int, Split] = {d: InnerSplit(r, mode) if inner else r for d, r in reads.items()}
        rank = site.machine.rank
        self.region = Box(outputs.with_splits(dict(reads)).box(rank).bounds[LEADING:])
        target = outputs.with_splits(needs)
        self.held = Box(target.box(rank).bounds[LEADING:])
        self.complete = self.held == self.region or mode in ("zeros", "circular")
        self._inside = (slice(None), slice(None), *(self.held & self.region).slices(self.region))
        by_torch = _torch_pads(mode, len(extents), dtype)
        self._sides = _sides(self.held, self.region, mode) if by_torch else None
        images = _images(stencil, extents) if mode == "circular" else ()
        self.movement = movement_or_none(site, source, target, dtype, "halo", images)

    def add_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Add the padding to the result of the movement; the shape in space is that of ``region``.

        By torch, where torch pads in the same way; else by the index in the domain of each padded element.
        """
        if self.complete:
            return x
        if self.mode == "constant":
            y = x.new_full((*x.shape[:LEADING], *self.region.shape), self.value)
            # Even without elements inside: the backward of this rank must reach the movement.
            y[self._inside] = x
            return y
        if self._sides is not None and x.numel():
            return F.pad(x, self._sides, self.mode)
        for d, (held, region) in enumerate(zip(self.held.bounds, self.region.bounds, strict=True)):
            if held == region:
                continue
            index = _origin(torch.arange(*region, device=x.device), self.extents[d], self.mode) - held[0]
            x = x.index_select(LEADING + d, index)
        return x


def _sides(held: Box, region: Box, mode: str) -> list[int] | None:
    # What torch's padding adds at each end, the last dimension first; None if torch pads otherwise.
    sides: list[int] = []
    for (start, stop), (first, last) in zip(held.bounds, region.bounds, strict=True):
        before, behind = start - first, last - stop
        if min(before, behind) < 0 or (mode == "reflect" and max(before, behind) >= stop - start):
            return None
        sides = [before, behind, *sides]
    return sides


@cache
def _torch_pads(mode: str, dims: int, dtype: torch.dtype) -> bool:
    # torch lacks kernels for some types: for bool, and in three dimensions for 16-bit floats.
    try:
        F.pad(torch.zeros((1,) * LEADING + (2,) * dims, dtype=dtype), (1, 1) * dims, mode)
    except NotImplementedError:
        return False
    return True


def _origin(index: torch.Tensor, n: int, mode: str) -> torch.Tensor:
    # Index in the domain of each element of the padded domain.
    return index.clamp(0, n - 1) if mode == "replicate" else (n - 1) - ((n - 1) - index.abs()).abs()


def _images(stencil: Stencil, extents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    # Shifts of the images of the domain: none, and before and after it where there is padding.
    steps = [
        (0, *((-n,) if w.left > 0 else ()), *((n,) if w.right > 0 else ()))
        for w, n in zip(stencil.windows, extents, strict=True)
    ]
    return tuple((0, 0, *shift) for shift in product(*steps))


def _check_value(value: float, dtype: torch.dtype) -> None:
    try:
        F.pad(torch.zeros(1, dtype=dtype), (1, 0), value=value)
    except (RuntimeError, TypeError) as error:
        raise ShapeError(f"padding by {value!r} is not possible for elements of {dtype}: {error}") from None


def _check(stencil: Stencil, extents: tuple[int, ...], mode: str) -> None:
    # torch's own limits.
    for window, n in zip(stencil.windows, extents, strict=True):
        widest = max(window.left, window.right)
        if (mode == "reflect" and widest >= max(n, 1)) or (mode == "circular" and widest > n):
            raise ShapeError(
                f"padding mode {mode!r} needs padding {'smaller than' if mode == 'reflect' else 'of at most'}"
                f" the extent: padding is {widest}, the global input {extents}"
            )
        if mode == "replicate" and n == 0:
            raise ShapeError(f"padding mode 'replicate' needs elements, the global input is {extents}")

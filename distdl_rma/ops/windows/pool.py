"""Average and max pooling with sliding windows: every rank fetches what its outputs read, and pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.ops.window_gather import WindowGather
from distdl_rma.ops.windows.window_operation import T, WindowOperation, extents_to_pool

_AVERAGES: dict[int, Any] = {2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMA: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

Coordinates = Sequence[torch.Tensor]


@dataclass(frozen=True)
class AvgPoolOptions:
    """Windows, and what they are divided by, as in torch."""

    stencil: Stencil
    count_include_pad: bool = True
    divisor_override: int | None = None

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of the output."""
        return self.stencil.outputs(extents_to_pool(shape))


@dataclass(frozen=True)
class MaxPoolOptions:
    """Windows, and whether to say where their largest elements are."""

    stencil: Stencil
    return_indices: bool = False

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of the output; also a ``ShapeError`` if a window reads nothing but padding."""
        extents = extents_to_pool(shape)
        outputs = self.stencil.outputs(extents)
        for window, n, m in zip(self.stencil.windows, extents, outputs, strict=True):
            for output in range(m):
                if _first_input(window, output) >= min(n, window.reads(output, output + 1)[1]):
                    raise ShapeError(
                        f"output {output} of {m} reads nothing but padding of the global input {extents}:"
                        f" {window}"
                    )
        return outputs


class AvgPooling(WindowOperation[AvgPoolOptions]):
    """Sums of the windows by torch, divided by the number of elements that count."""

    def _prepare(self, source: Decomposition, options: AvgPoolOptions) -> None:
        windows = options.stencil.windows
        self._read = WindowGather(self.site, options.stencil, source, self.output, self.dtype)
        self.gather = self._read.movement
        # torch has a divisor of one's own from two dimensions on.
        self._lead = (1,) * (2 - len(windows))
        self._kernel = (*self._lead, *(window.kernel for window in windows))
        self._stride = (*self._lead, *(window.stride for window in windows))
        counts = [
            [_counted(window, n, j, options.count_include_pad) for j in range(*bounds)]
            for window, n, bounds in zip(windows, self.extents, self.box.bounds[LEADING:], strict=True)
        ]
        # One number if all outputs of this rank have the same, else also a tensor of one for each.
        self._divisor, self._divisors = 1, None
        if options.divisor_override is not None:
            self._divisor = int(options.divisor_override)
        elif all(len(set(count)) == 1 for count in counts):
            self._divisor = prod(count[0] for count in counts)
        else:
            self._divisors = outer_product(counts, sum_dtype(self.dtype))

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        padded = self._read.add_padding(x).to(sum_dtype(x.dtype))
        lifted = padded.reshape(*x.shape[:LEADING], *self._lead, *padded.shape[LEADING:])
        average = _AVERAGES[len(self._kernel)]
        y: torch.Tensor = average(lifted, self._kernel, self._stride, divisor_override=self._divisor)
        y = y.reshape(self.box.shape)
        return (y if self._divisors is None else y / self._divisors).to(x.dtype)


def _counted(window: Window, n: int, output: int, count_include_pad: bool) -> int:
    # As torch: the part of a window behind the right padding never counts.
    start, stop = window.reads(output, output + 1)
    stop = min(stop, n + window.right)
    if not count_include_pad:
        start, stop = max(start, 0), min(stop, n)
    return max(stop - start, 1)


def outer_product(factors: Any, dtype: torch.dtype) -> torch.Tensor:
    """Product of one factor for each place in each dimension."""
    product = torch.ones((), dtype=torch.float64)
    for factor in factors:
        product = product.unsqueeze(-1) * torch.tensor(factor, dtype=torch.float64)
    return product.to(dtype)


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
        pool = _MAXIMA[len(spatial)]
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


class MaxPooling(MaxWindows[MaxPoolOptions]):
    """The largest elements of sliding windows over a padding of minus infinity."""

    def _prepare(self, source: Decomposition, options: MaxPoolOptions) -> None:
        stencil, padding = options.stencil, float("-inf")
        self._read = WindowGather(self.site, stencil, source, self.output, self.dtype, "constant", padding)
        self.gather, self.start = self._read.movement, self._read.held.start
        self.return_indices, self._windows = options.return_indices, stencil.windows
        self._arguments = list(zip(*((w.kernel, w.stride, w.dilation) for w in self._windows), strict=True))
        self._padded = self._read.held != self._read.region

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        if self.return_indices:
            return super()._local(x)
        kernel, stride, dilation = self._arguments
        y: torch.Tensor = _MAXIMA[len(kernel)](self._read.add_padding(x), kernel, stride, 0, dilation)
        # Only where all that a window reads is -inf may the padding have won.
        return super()._local(x) if self._padded and bool(y.isneginf().any()) else y

    def _argmax(self, x: torch.Tensor) -> Coordinates:
        found = argmax_windows(self._read.add_padding(x), *self._arguments)
        found = [at + first for at, first in zip(found, self._read.region.start, strict=True)]
        return self._inside(found) if self._padded else found

    def _inside(self, found: Coordinates) -> Coordinates:
        # Where all that a window reads is -inf, the padding may have won; torch takes the first input then.
        beyond = [(at < 0) | (at >= n) for at, n in zip(found, self.extents, strict=True)]
        outside = torch.stack(beyond).any(0)
        first = [
            torch.tensor([_first_input(window, j) for j in range(*bounds)])
            for window, bounds in zip(self._windows, self.box.bounds[LEADING:], strict=True)
        ]
        inputs = torch.meshgrid(*first, indexing="ij")
        return [torch.where(outside, i, at) for i, at in zip(inputs, found, strict=True)]


def _first_input(window: Window, output: int) -> int:
    # The first of a window's taps that is not in the left padding.
    start = window.reads(output, output + 1)[0]
    return start + -(min(start, 0) // window.dilation) * window.dilation

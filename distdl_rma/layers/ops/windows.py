"""Pooling and padding: every rank gathers the inputs of its outputs and computes the outputs.

Two ranks, 8 inputs, an average over windows of 3 with padding 1. The outputs are in balanced blocks, and each
rank gathers what its outputs read::

    inputs      rank 0  |0 1 2 3|      rank 1  |4 5 6 7|
    outputs             |0 1 2 3|              |4 5 6 7|
    gathered         - 0 1 2 3 4            3 4 5 6 7 -         (-: padding, which each rank makes itself)

What a window reads is known from extents alone, as one of two kinds::

    Window       slides: kernel, stride, dilation, padding       pools, padding
    TableWindow  a first and a last input for each output        adaptive pools; resizing (`resizing.py`)

An adaptive average is the exception: its windows may be as large as the image. There every rank sums its own
data for each window that they meet, and ``scatter`` adds these sums at the owners of the outputs.

A divisor, a position, or the first of several equal maxima depends on global indices, which a block does not
show. Each operation computes these from the global extents, and calls torch's kernel only where that gives
the same for a part as for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import ReadersSplit, Stencil, TableWindow, Window, WindowSplit
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import RECORDINGS, as_step
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.order import outputs_of
from distdl_rma.layers.ops.core.staged import movement_or_none
from distdl_rma.layers.ops.window_gather import WindowGather
from distdl_rma.layers.staging import up


class _Options(Protocol):
    """What an operation needs to know of its options before it plans."""

    def outputs(self, shape: tuple[int, ...]) -> Sequence[int]:
        """Spatial extents of the global output for a global input; ``ShapeError`` if there is none."""

    def windows(self, extents: tuple[int, ...], dtype: torch.dtype) -> Sequence[Window | TableWindow]:
        """Inputs that each output reads, per dimension; at most, where the padding reads others."""


T = TypeVar("T", bound=_Options)


class WindowOperation(GatherComputeScatter, Generic[T]):
    """Operation whose outputs each read a window of an input (batch, channel, *spatial).

    The output is balanced on P_y; if P_y is the input's partition, the batch keeps the input's cut.
    ``extents`` are the global input's in space. ``box`` is the part that this rank computes, in ``dtype``.

    A subclass says in ``_prepare`` what is gathered, and in ``_local`` how outputs follow from it. It plans
    for any decomposition, also one whose blocks are empty: then ``_local`` is not called, but the rank takes
    part in the movements.
    """

    inexact = True  # whether elements must be floating point numbers
    integers: Sequence[torch.dtype] = ()  # types that it takes also then

    def __init__(
        self, site: CallSite, source: Decomposition, P_y: Partition, dtype: torch.dtype, options: T
    ) -> None:
        if self.inexact and not dtype.is_floating_point and dtype not in self.integers:
            raise UnsupportedError(f"the input is {dtype}; only floating point numbers are supported")
        output = Decomposition.balanced(P_y, (*source.shape[:LEADING], *options.outputs(source.shape)))
        if P_y == source.partition:
            output = outputs_of(
                site.machine,
                source,
                output,
                lambda: [window.reads for window in options.windows(source.shape[LEADING:], dtype)],
            ).with_splits({0: source.splits[0]})
        self.rank = rank = site.machine.rank
        super().__init__(site, rank in source.partition, rank in P_y, output)
        self.extents, self.box, self.dtype = source.shape[LEADING:], output.box(rank), dtype
        self._prepare(source, options)
        self._empty = self.box.empty

    def _prepare(self, source: Decomposition, options: T) -> None:
        """Set the movements, and the values that ``_local`` uses."""
        raise NotImplementedError

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local outputs; no computation if there are no elements."""
        if not self._empty:
            return self._local(x)
        y = x.new_zeros(self.box.shape, dtype=self.dtype)
        return y + x.sum().to(y.dtype) if x.requires_grad else y

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank, at least one element, from the gathered inputs."""
        raise NotImplementedError

    def _gather(
        self, stencil: Stencil, source: Decomposition, mode: str = "zeros", value: float = 0.0
    ) -> None:
        """Gather what the windows of a stencil read, into ``_read``."""
        self._read = WindowGather(self.site, stencil, source, self.output, self.dtype, mode, value)
        self.gather = self._read.movement

    def read_by_tables(self, windows: Sequence[TableWindow]) -> Decomposition:
        """Decomposition of the inputs that each rank's outputs read, by a table for each dimension."""
        reads = zip(self.output.splits[LEADING:], windows, self.extents, strict=True)
        return self.output.with_splits(dict(enumerate((WindowSplit(*read) for read in reads), LEADING)))


def extents_to_pool(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Spatial extents of a global input; ``ShapeError`` if one is 0."""
    if 0 in shape[LEADING:]:
        raise ShapeError(f"the global input {shape} has no elements to pool")
    return shape[LEADING:]


# Modes in which torch allows an output with extent 0 in all dimensions; every mode allows it in some.
_MAY_BE_EMPTY = ("zeros", "constant", "circular")
# Modes in which torch crops before it pads, so that it cannot crop more than the input's extent.
_CROP_FIRST = ("zeros", "constant")


@dataclass(frozen=True)
class PadOptions:
    """Left and right padding of each spatial dimension, negative to crop; mode as in ``WindowGather``."""

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

    def windows(self, extents: tuple[int, ...], dtype: torch.dtype) -> Sequence[Window]:
        """Each output reads one element; those in the padding read others, or none."""
        return [Window(1, left=left, right=right) for left, right in self.sides]


class Padding(WindowOperation[PadOptions]):
    """Padding: each rank gathers its inputs, and adds the padding that the movement does not bring."""

    inexact = False

    def _prepare(self, source: Decomposition, options: PadOptions) -> None:
        stencil = Stencil(tuple(options.windows(self.extents, self.dtype)))
        self._gather(stencil, source, options.mode, options.value)

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        y = self._read.add_padding(x)
        # Without a movement the result would be the input itself.
        return y.clone() if self.gather is None else y


_AVERAGES: dict[int, Any] = {2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMA: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

Coordinates = Sequence[torch.Tensor]


@dataclass(frozen=True)
class SlidingOptions:
    """Windows that slide over the input."""

    stencil: Stencil

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of the output."""
        return self.stencil.outputs(extents_to_pool(shape))

    def windows(self, extents: tuple[int, ...], dtype: torch.dtype) -> Sequence[Window]:
        """The stencil's windows."""
        return self.stencil.windows


@dataclass(frozen=True)
class AvgPoolOptions(SlidingOptions):
    """Windows, and how to choose their divisors, as in torch."""

    count_include_pad: bool = True
    divisor_override: int | None = None


@dataclass(frozen=True)
class MaxPoolOptions(SlidingOptions):
    """Windows, and whether to return the indices of their largest elements."""

    return_indices: bool = False

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial extents of the output; ``ShapeError`` also if a window reads only padding."""
        extents, outputs = shape[LEADING:], super().outputs(shape)
        for window, n, m in zip(self.stencil.windows, extents, outputs, strict=True):
            for output in range(m):
                if _first_input(window, output) >= min(n, window.reads(output, output + 1)[1]):
                    raise ShapeError(
                        f"output {output} of {m} reads nothing but padding of the global input {extents}:"
                        f" {window}"
                    )
        return outputs


class AvgPooling(WindowOperation[AvgPoolOptions]):
    """Average pooling: torch sums the windows, and sums are divided by the number of counted elements.

    The number depends on whether a window reaches over the end of the global input. So all padding is in the
    tensor, where torch counts it, and torch divides by one number if all windows of this rank have the same.
    """

    def _prepare(self, source: Decomposition, options: AvgPoolOptions) -> None:
        windows = options.stencil.windows
        self._gather(options.stencil, source)
        # torch's one-dimensional pooling has no divisor_override.
        self._lead = (1,) * (2 - len(windows))
        self._kernel = (*self._lead, *(window.kernel for window in windows))
        self._stride = (*self._lead, *(window.stride for window in windows))
        counts = [
            [_counted(window, n, j, options.count_include_pad) for j in range(*bounds)]
            for window, n, bounds in zip(windows, self.extents, self.box.bounds[LEADING:], strict=True)
        ]
        # A number if all outputs of this rank have the same divisor, else 1 and a tensor of divisors.
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
        if self._divisors is not None:
            y = y / (self._divisors if y.is_cpu else up(self._divisors, y.device))
        return y.to(x.dtype)


def _counted(window: Window, n: int, output: int, count_include_pad: bool) -> int:
    # As in torch, the part of a window beyond the right padding never counts.
    start, stop = window.reads(output, output + 1)
    stop = min(stop, n + window.right)
    if not count_include_pad:
        start, stop = max(start, 0), min(stop, n)
    return max(stop - start, 1)


def outer_product(factors: Any, dtype: torch.dtype) -> torch.Tensor:
    """Tensor of products, of one factor per dimension."""
    product = torch.ones((), dtype=torch.float64)
    for factor in factors:
        product = product.unsqueeze(-1) * torch.tensor(factor, dtype=torch.float64)
    return product.to(dtype)


class MaxWindows(WindowOperation[T]):
    """Max pooling: the largest element of each window; the gradient goes to this element.

    Subclasses implement ``_argmax``, and set ``start``, the first global index of the gathered input in each
    spatial dimension, and ``return_indices``. Indices are of the global image: of a local index, rows before
    the block and the width of the image are missing.
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

    def take_indices(self, y: torch.Tensor) -> torch.Tensor:
        """Flat indices in the global plane of the elements of ``y``, the last result; callable once."""
        indices, self._indices = self._indices, None
        return y.new_zeros(y.shape, dtype=torch.int64) if indices is None else indices


def argmax_windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Coordinates:
    """Coordinates of the largest element of each sliding window, one tensor per spatial dimension.

    Of several equal elements the first is taken, as in torch; NaN is larger than all numbers.
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
    """Elements of ``x`` at these coordinates of its spatial dimensions; differentiable."""
    index = flat_index(coordinates, x.shape[LEADING:])
    return x.flatten(LEADING).gather(LEADING, index.flatten(LEADING)).view(index.shape)


class MaxPooling(MaxWindows[MaxPoolOptions]):
    """Max pooling with sliding windows, also of integers; the padding is the smallest value of the type.

    torch's kernel pads by itself, with elements that no window takes. A rank in the middle of an image has no
    padding, one at its end has it at one side. Where torch, which pads both sides alike, would compute
    further outputs, the padding is in the tensor, and a window that reads nothing but -inf is decided by
    indices.
    """

    # Those of torch's kernels.
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

    def _prepare(self, source: Decomposition, options: MaxPoolOptions) -> None:
        floats = self.dtype.is_floating_point
        stencil, padding = options.stencil, float("-inf") if floats else torch.iinfo(self.dtype).min
        self._gather(stencil, source, "constant", padding)
        self.start = self._read.held.start
        self.return_indices, self._windows = options.return_indices, stencil.windows
        self._arguments = list(zip(*((w.kernel, w.stride, w.dilation) for w in self._windows), strict=True))
        # In one dimension torch has no kernel for integers but that of indices.
        self._by_index = self.return_indices or not (floats or len(self._windows) > 1)
        self._padded = self._read.held != self._read.region
        self._of_torch = self._padding_of_torch()

    def _padding_of_torch(self) -> list[int] | None:
        # Padding with which torch's kernel computes this rank's outputs; None if it cannot.
        held, found = self._read.held, list[int]()
        for window, (start, stop), (first, last), outputs in zip(
            self._windows, held.bounds, self._read.region.bounds, self.box.shape[LEADING:], strict=True
        ):
            # torch pads both sides alike: behind, with padding that no further output reads.
            padding = start - first
            made = (stop - start + 2 * padding - window.span) // window.stride + 1
            if not last - stop <= padding <= window.kernel // 2 or made != outputs:
                return None
            found.append(padding)
        return None if held.empty else found

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        if self._by_index:
            return super()._local(x)
        kernel, stride, dilation = self._arguments
        pool = _MAXIMA[len(kernel)]
        if self._of_torch is not None:
            return pool(x, kernel, stride, self._of_torch, dilation)
        y: torch.Tensor = pool(self._read.add_padding(x), kernel, stride, 0, dilation)
        # A result of -inf may be an element of the padding.
        return super()._local(x) if self._padded and _has_infinite(y) else y

    def _argmax(self, x: torch.Tensor) -> Coordinates:
        found = argmax_windows(self._read.add_padding(x), *self._arguments)
        found = [at + first for at, first in zip(found, self._read.region.start, strict=True)]
        return self._inside(found) if self._padded else found

    def _inside(self, found: Coordinates) -> Coordinates:
        # If a window reads only -inf, the index may be in the padding; torch takes the first input then.
        beyond = [(at < 0) | (at >= n) for at, n in zip(found, self.extents, strict=True)]
        outside = torch.stack(beyond).any(0)
        first = [
            torch.tensor([_first_input(window, j) for j in range(*bounds)], device=outside.device)
            for window, bounds in zip(self._windows, self.box.bounds[LEADING:], strict=True)
        ]
        inputs = torch.meshgrid(*first, indexing="ij")
        return [torch.where(outside, i, at) for i, at in zip(inputs, found, strict=True)]


def _has_infinite(y: torch.Tensor) -> bool:
    # A replay has no branch, and so cannot go the other way.
    if RECORDINGS and RECORDINGS[-1].notes:
        _refuse_infinite(y)
        return False
    return bool(y.isneginf().any())


@as_step
def _refuse_infinite(y: torch.Tensor) -> None:
    if _has_infinite(y):
        raise UnsupportedError(
            "max_pool of a compiled model: windows at the padding read nothing but -inf; run the model"
            " without compile()"
        )


def _first_input(window: Window, output: int) -> int:
    # First input of a window that is not in the left padding.
    start = window.reads(output, output + 1)[0]
    return start + -(min(start, 0) // window.dilation) * window.dilation


@dataclass(frozen=True)
class AdaptiveOptions:
    """Extents of the output, None for an unchanged extent; and whether to return indices of maxima."""

    output_size: tuple[int | None, ...]
    return_indices: bool = False

    def windows(self, extents: tuple[int, ...], dtype: torch.dtype | None = None) -> list[TableWindow]:
        """Inputs that each output reads, per dimension."""
        sizes = zip(extents, self.output_size, strict=True)
        return [TableWindow.adaptive(n, n if size is None else size) for n, size in sizes]

    def outputs(self, shape: tuple[int, ...]) -> list[int]:
        """Spatial extents of the output."""
        return [window.outputs for window in self.windows(extents_to_pool(shape))]


class AdaptiveAvgPooling(WindowOperation[AdaptiveOptions]):
    """Adaptive average pooling: every rank sums its own data per window, owners of outputs add the sums.

    Windows of 7 elements for 3 outputs, over two ranks; each rank sends one number per window that it meets::

        elements     0 1 2 3 | 4 5 6
        window 0    [0 1 2]  |                 rank 0: the whole sum
        window 1        [2 3 | 4]              rank 0: 2 + 3, rank 1: 4
        window 2             |[4 5 6]          rank 1: the whole sum

    A global average of an image so moves one number per rank and channel.
    """

    def _prepare(self, source: Decomposition, options: AdaptiveOptions) -> None:
        windows = options.windows(self.extents)
        self._result_dtype, self.dtype = self.dtype, sum_dtype(self.dtype)
        readers = zip(source.splits[LEADING:], windows, [w.outputs for w in windows], strict=True)
        sums = source.with_splits(dict(enumerate((ReadersSplit(*each) for each in readers), LEADING)))
        outputs, own = self.box, source.box(self.rank)
        self.works, self.box = self.reads, sums.box(self.rank)
        self.scatter = movement_or_none(self.site, sums, self.output, self.dtype, "sums")
        self._contributions = [
            _contributions(*each)
            for each in zip(windows, own.bounds[LEADING:], self.box.bounds[LEADING:], strict=True)
        ]
        lengths = [
            [window.last[j] - window.first[j] + 1 for j in range(*bounds)]
            for window, bounds in zip(windows, outputs.bounds[LEADING:], strict=True)
        ]
        self._divisors, self._shape = outer_product(lengths, self.dtype), outputs.shape

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.dtype)
        for d, (inputs, outputs, count) in enumerate(self._contributions, LEADING):
            if count == 1:
                y = y.sum(d, keepdim=True)
                continue
            zeros = y.new_zeros((*y.shape[:d], count, *y.shape[d + 1 :]))
            # Neighbouring windows may share elements, which are then repeated.
            if not y.is_cpu:
                inputs, outputs = up(inputs, y.device), up(outputs, y.device)
            y = zeros.index_add(d, outputs, y if len(inputs) == y.shape[d] else y.index_select(d, inputs))
        return y

    def finish(self, y: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Divide by the number of elements of each window, with one rounding in short types."""
        divisors = self._divisors if y.is_cpu else up(self._divisors, y.device)
        return (y.reshape(self._shape) / divisors).to(self._result_dtype)


def _contributions(
    window: TableWindow, own: tuple[int, int], sums: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    # Pairs of own elements and the sums that they contribute to, as two index tensors; number of sums.
    inputs, outputs = [], []
    for j in range(*sums):
        reads = range(max(window.first[j], own[0]), min(window.last[j] + 1, own[1]))
        inputs += [i - own[0] for i in reads]
        outputs += [j - sums[0]] * len(reads)
    index = torch.int64
    return torch.tensor(inputs, dtype=index), torch.tensor(outputs, dtype=index), sums[1] - sums[0]


class AdaptiveMaxPooling(MaxWindows[AdaptiveOptions]):
    """Adaptive max pooling: each rank gathers all inputs of its windows.

    Partial maxima could be merged as sums are, but the gradient needs the place of each maximum.
    """

    def _prepare(self, source: Decomposition, options: AdaptiveOptions) -> None:
        windows, self.return_indices = options.windows(self.extents), options.return_indices
        reads = self.read_by_tables(windows)
        self.gather = movement_or_none(self.site, source, reads, self.dtype, "windows")
        self.start = reads.box(self.rank).start[LEADING:]
        bounds = self.box.bounds[LEADING:]
        self._inputs = [_even(window, *b) for window, b in zip(windows, bounds, strict=True)]

    def _argmax(self, x: torch.Tensor) -> Coordinates:
        # Windows are extended to the length of the longest and placed side by side, for torch's pooling.
        all_inputs = self._inputs if x.is_cpu else [up(inputs, x.device) for inputs in self._inputs]
        for d, (inputs, first) in enumerate(zip(all_inputs, self.start, strict=True), LEADING):
            x = x.index_select(d, inputs.flatten() - first)
        lengths = [inputs.shape[1] for inputs in all_inputs]
        found = argmax_windows(x, lengths, lengths, [1] * len(lengths))
        return [inputs.flatten()[at] for inputs, at in zip(all_inputs, found, strict=True)]


def _even(window: TableWindow, start: int, stop: int) -> torch.Tensor:
    # Inputs of the windows, one row each; shorter rows begin with copies of their first input.
    first, last = (torch.tensor(ends[start:stop], dtype=torch.int64) for ends in (window.first, window.last))
    length = int((last - first).max()) + 1 if stop > start else 1
    return torch.maximum(last.unsqueeze(1) - torch.arange(length - 1, -1, -1), first.unsqueeze(1))

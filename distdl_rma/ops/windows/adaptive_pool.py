"""Pooling to a given output size, by windows as even as the global extents allow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl_rma.dtypes import sum_dtype
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import ReadersSplit, TableWindow
from distdl_rma.ops.core.staged import movement_or_none
from distdl_rma.ops.windows.pool import Coordinates, MaxWindows, argmax_windows, outer_product
from distdl_rma.ops.windows.window_operation import WindowOperation, extents_to_pool


@dataclass(frozen=True)
class AdaptiveOptions:
    """Extents of the output, None where one stays; and whether to say where the largest elements are."""

    output_size: tuple[int | None, ...]
    return_indices: bool = False

    def windows(self, extents: tuple[int, ...]) -> list[TableWindow]:
        """What each output reads, dimension by dimension."""
        sizes = zip(extents, self.output_size, strict=True)
        return [TableWindow.adaptive(n, n if size is None else size) for n, size in sizes]

    def outputs(self, shape: tuple[int, ...]) -> list[int]:
        """Spatial extents of the output."""
        return [window.outputs for window in self.windows(extents_to_pool(shape))]


class AdaptiveAvgPooling(WindowOperation[AdaptiveOptions]):
    """Averages: every rank sums what its own data contributes to each window, the owners add the sums."""

    def _prepare(self, source: Decomposition, options: AdaptiveOptions) -> None:
        windows = options.windows(self.extents)
        self._result_dtype, self.dtype = self.dtype, sum_dtype(self.dtype)
        readers = (ReadersSplit(*both) for both in zip(source.splits[LEADING:], windows, strict=True))
        sums = source.with_splits(dict(enumerate(readers, LEADING)))
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
            # Neighbouring windows may share elements: these are there twice.
            y = zeros.index_add(d, outputs, y if len(inputs) == y.shape[d] else y.index_select(d, inputs))
        return y

    def finish(self, y: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Divide by the number of elements of each window, with one rounding in short types."""
        return (y.reshape(self._shape) / self._divisors).to(self._result_dtype)


def _contributions(
    window: TableWindow, own: tuple[int, int], sums: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    # Which of this rank's elements goes into which of its sums.
    inputs, outputs = [], []
    for j in range(*sums):
        reads = range(max(window.first[j], own[0]), min(window.last[j] + 1, own[1]))
        inputs += [i - own[0] for i in reads]
        outputs += [j - sums[0]] * len(reads)
    index = torch.int64
    return torch.tensor(inputs, dtype=index), torch.tensor(outputs, dtype=index), sums[1] - sums[0]


class AdaptiveMaxPooling(MaxWindows[AdaptiveOptions]):
    """The largest elements of adaptive windows, all of whose inputs a rank fetches."""

    def _prepare(self, source: Decomposition, options: AdaptiveOptions) -> None:
        windows, self.return_indices = options.windows(self.extents), options.return_indices
        reads = self.read_by_tables(windows)
        self.gather = movement_or_none(self.site, source, reads, self.dtype, "windows")
        self.start = reads.box(self.rank).start[LEADING:]
        bounds = self.box.bounds[LEADING:]
        self._inputs = [_even(window, *b) for window, b in zip(windows, bounds, strict=True)]

    def _argmax(self, x: torch.Tensor) -> Coordinates:
        # All windows of a dimension as long as the longest, side by side: that torch can pool.
        for d, (inputs, first) in enumerate(zip(self._inputs, self.start, strict=True), LEADING):
            x = x.index_select(d, inputs.flatten() - first)
        lengths = [inputs.shape[1] for inputs in self._inputs]
        found = argmax_windows(x, lengths, lengths, [1] * len(lengths))
        return [inputs.flatten()[at] for inputs, at in zip(self._inputs, found, strict=True)]


def _even(window: TableWindow, start: int, stop: int) -> torch.Tensor:
    # Inputs of some windows, one row each; a shorter one begins with copies of its first input.
    first, last = (torch.tensor(ends[start:stop], dtype=torch.int64) for ends in (window.first, window.last))
    length = int((last - first).max()) + 1 if stop > start else 1
    return torch.maximum(last.unsqueeze(1) - torch.arange(length - 1, -1, -1), first.unsqueeze(1))

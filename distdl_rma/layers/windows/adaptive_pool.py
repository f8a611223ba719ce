"""Pooling to a given output size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, Unpack

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Split
from distdl_rma.geometry.stencil import ReadersSplit, ReadsSplit, TableWindow
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan
from distdl_rma.layers.windows.base import WindowLayer
from distdl_rma.ops.movement import movement_or_none
from distdl_rma.ops.tensors import sum_dtype
from distdl_rma.ops.windows.argmax_windows import argmax_windows, flat_index, gather_at

Size = int | None | Sequence[int | None]


class _Adaptive(WindowLayer):
    # Windows as even as the global extents allow.
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        output_size: Size,
        name: str | None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        sizes = _sizes(type(self).__name__, output_size, self._dims)
        super().__init__(P_x, P_y, name=name, **callbacks)
        self.output_size = sizes

    def _reaches(self, source: Decomposition) -> list[TableWindow]:
        extents = source.shape[LEADING:]
        if 0 in extents:
            raise ShapeError(f"the global input {source.shape} has no elements to pool")
        return [
            TableWindow.adaptive(n, n if size is None else size)
            for n, size in zip(extents, self.output_size, strict=True)
        ]

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"output_size={self.output_size}, {super().extra_repr()}"


def _sizes(kind: str, value: Size, dims: int) -> tuple[int | None, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    try:
        sizes = tuple(None if v is None else as_int(v) for v in values)
    except TypeError:
        sizes = ()
    if len(sizes) != dims or any(size is not None and size < 0 for size in sizes):
        raise ShapeError(f"{kind}: output_size is an integer or None, or {dims} of them; got {value!r}")
    return sizes


class DistributedAdaptiveAvgPool(_Adaptive):
    """Average pooling to a given global size, of a tensor that is split over ranks.

    Every rank sums what its own data contributes to each output; these sums travel, not the data, and the
    owners of the outputs add them: a global pool sends one number per channel and rank. Local input: the
    shard of this rank, of any size that forms a grid with the others'. Local output: the balanced shard of
    the global output on P_y; where that is P_x the batch stays cut as it is. Collective to construct over
    the machine; a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    output_size
        As in torch: the global output; None for a dimension keeps its extent.
    P_y
        Partition of the output; P_x if None.
    name
        For messages.

    Raises
    ------
    PartitionError
        If a partition does not fit the dimensions.
    ShapeError
        If an argument is none that torch takes. In a call, on all ranks alike: if the local shapes form no
        grid, the types differ, or a spatial dimension is empty.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11.
    """

    def __init__(
        self,
        P_x: Partition,
        output_size: Size,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, output_size, name, **callbacks)

    def _workers(self, P_x: Partition, P_y: Partition) -> Partition:
        return P_x

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank sums, the owners of the outputs add the sums."""
        reaches, rank = self._reaches(source), self.machine.rank
        readers: dict[int, Split] = {
            d: ReadersSplit(source.splits[d], reach) for d, reach in enumerate(reaches, LEADING)
        }
        partial = source.with_splits(readers)
        outputs = self.balanced(source, [reach.outputs for reach in reaches])
        wide = sum_dtype(dtype)
        steps = [
            _contributions(reach, own, out)
            for reach, own, out in zip(
                reaches, source.box(rank).bounds[LEADING:], partial.box(rank).bounds[LEADING:], strict=True
            )
        ]
        return CallPlan(
            None,
            movement_or_none(self.site, partial, outputs, wide, "sums"),
            box=partial.box(rank),
            dtype=wide,
            steps=steps,
            narrow=dtype,
            shape=outputs.box(rank).shape,
            counts=[
                torch.tensor([reach.last[j] - reach.first[j] + 1 for j in range(*bounds)], dtype=wide)
                for reach, bounds in zip(reaches, outputs.box(rank).bounds[LEADING:], strict=True)
            ],
        )

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """Sums of this rank's elements, one dimension after the other."""
        y = x.to(flow.facts["dtype"])
        for d, (inputs, outputs, count) in enumerate(flow.facts["steps"], LEADING):
            if count == 1:
                y = y.sum(d, keepdim=True)
                continue
            zeros = y.new_zeros((*y.shape[:d], count, *y.shape[d + 1 :]))
            # Neighbouring windows may share elements: these are there twice.
            y = zeros.index_add(d, outputs, y if len(inputs) == y.shape[d] else y.index_select(d, inputs))
        return y

    def finish(self, flow: CallPlan, y: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Divide by the number of elements of each window, with one rounding in short types."""
        divisor = torch.ones((), dtype=y.dtype)
        for count in flow.facts["counts"]:
            divisor = divisor.unsqueeze(-1) * count
        return (y.reshape(flow.facts["shape"]) / divisor).to(flow.facts["narrow"])


def _contributions(
    reach: TableWindow, own: tuple[int, int], out: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    # Which of this rank's elements goes into which of its sums.
    inputs, outputs = [], []
    for j in range(*out):
        window = range(max(reach.first[j], own[0]), min(reach.last[j] + 1, own[1]))
        inputs += [i - own[0] for i in window]
        outputs += [j - out[0]] * len(window)
    return (
        torch.tensor(inputs, dtype=torch.int64),
        torch.tensor(outputs, dtype=torch.int64),
        out[1] - out[0],
    )


class DistributedAdaptiveMaxPool(_Adaptive):
    """Max pooling to a given global size, of a tensor that is split over ranks.

    Every rank fetches what its outputs read. Local input: the shard of this rank, of any size that forms a
    grid with the others'. Local output: the balanced shard of the global output on P_y, but where that is
    P_x the batch stays cut as it is; with ``return_indices`` a pair of it and of the positions in the
    *global* plane, flattened, as the sequential layer gives them. Collective to construct over the machine;
    a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    output_size
        As in torch: the global output; None for a dimension keeps its extent.
    return_indices
        As in torch.
    P_y
        Partition of the output; P_x if None.
    name
        For messages.

    Raises
    ------
    PartitionError
        If a partition does not fit the dimensions.
    ShapeError
        If an argument is none that torch takes. In a call, on all ranks alike: if the local shapes form no
        grid, the types differ, or a spatial dimension is empty.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11.
    """

    def __init__(
        self,
        P_x: Partition,
        output_size: Size,
        return_indices: bool = False,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, output_size, name, **callbacks)
        self.return_indices = bool(return_indices)
        self._index: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        y = super().forward(input)
        index, self._index = self._index, None
        if not self.return_indices:
            return y
        return y, torch.zeros(y.shape, dtype=torch.int64) if index is None else index

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank fetches what its outputs read."""
        reaches, rank = self._reaches(source), self.machine.rank
        outputs = self.balanced(source, [reach.outputs for reach in reaches])
        box = outputs.box(rank)
        reads: dict[int, Split] = {
            d: ReadsSplit(outputs.splits[d], reach, source.shape[d])
            for d, reach in enumerate(reaches, LEADING)
        }
        target = outputs.with_splits(reads)
        return CallPlan(
            movement_or_none(self.site, source, target, dtype, "windows"),
            None,
            box=box,
            dtype=dtype,
            extents=source.shape[LEADING:],
            start=target.box(rank).start[LEADING:],
            windows=[_even(r, *b) for r, b in zip(reaches, box.bounds[LEADING:], strict=True)],
        )

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """The largest elements; the gradient goes to where they were."""
        extents, start, windows = (flow.facts[key] for key in ("extents", "start", "windows"))
        # All windows of a dimension as long as the longest, side by side: that torch can pool.
        even = x.detach()
        for d, (window, first) in enumerate(zip(windows, start, strict=True), LEADING):
            even = even.index_select(d, window.flatten() - first)
        lengths = [window.shape[1] for window in windows]
        places = [
            window.flatten()[place]
            for window, place in zip(
                windows, argmax_windows(even, lengths, lengths, [1] * self._dims), strict=True
            )
        ]
        if self.return_indices:
            self._index = flat_index(places, extents)
        return gather_at(x, [place - first for place, first in zip(places, start, strict=True)])

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{super().extra_repr()}, return_indices={self.return_indices}"


def _even(reach: TableWindow, start: int, stop: int) -> torch.Tensor:
    # Inputs of some windows, one row each; a shorter one begins with copies of its first input.
    first, last = (torch.tensor(ends[start:stop], dtype=torch.int64) for ends in (reach.first, reach.last))
    length = int((last - first).max()) + 1 if stop > start else 1
    return torch.maximum(last.unsqueeze(1) - torch.arange(length - 1, -1, -1), first.unsqueeze(1))


class DistributedAdaptiveAvgPool1d(DistributedAdaptiveAvgPool):
    """Distributed ``torch.nn.AdaptiveAvgPool1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedAdaptiveAvgPool2d(DistributedAdaptiveAvgPool):
    """Distributed ``torch.nn.AdaptiveAvgPool2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedAdaptiveAvgPool3d(DistributedAdaptiveAvgPool):
    """Distributed ``torch.nn.AdaptiveAvgPool3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3


class DistributedAdaptiveMaxPool1d(DistributedAdaptiveMaxPool):
    """Distributed ``torch.nn.AdaptiveMaxPool1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedAdaptiveMaxPool2d(DistributedAdaptiveMaxPool):
    """Distributed ``torch.nn.AdaptiveMaxPool2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedAdaptiveMaxPool3d(DistributedAdaptiveMaxPool):
    """Distributed ``torch.nn.AdaptiveMaxPool3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3

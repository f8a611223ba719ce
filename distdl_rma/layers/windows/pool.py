"""Average and max pooling with sliding windows."""

from __future__ import annotations

from math import prod
from typing import Any, Unpack

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.stencil import Stencil, Window
from distdl_rma.layers.core.arguments import per_dim
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan
from distdl_rma.layers.windows.base import WindowLayer
from distdl_rma.ops.tensors import sum_dtype
from distdl_rma.ops.window_gather import WindowGather
from distdl_rma.ops.windows.argmax_windows import argmax_windows, flat_index, gather_at

_AVERAGES: dict[int, Any] = {2: F.avg_pool2d, 3: F.avg_pool3d}

Size = int | tuple[int, ...]


class _Pool(WindowLayer):
    # Sliding windows over a padded input; subclasses say what the padding holds.
    _mode = "zeros"
    _padding = 0.0

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        kernel_size: Size,
        stride: Size | None,
        padding: Size,
        dilation: Size,
        ceil_mode: bool,
        name: str | None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind, dims = type(self).__name__, self._dims
        kernel = per_dim(kind, "kernel_size", kernel_size, dims, 1)
        steps = kernel if stride is None else per_dim(kind, "stride", stride, dims, 1)
        sides = per_dim(kind, "padding", padding, dims, 0)
        holes = per_dim(kind, "dilation", dilation, dims, 1)
        stencil = Stencil.of(kernel, steps, holes, tuple((p, p) for p in sides), bool(ceil_mode))
        for window in stencil.windows:
            if window.left > window.kernel // 2:
                raise ShapeError(
                    f"{kind}: padding {window.left} is more than half of kernel_size"
                    f" {window.kernel}: kernel_size={kernel}, padding={sides}"
                )
        super().__init__(P_x, P_y, name=name, **callbacks)
        self.stencil = stencil
        self.kernel_size, self.stride, self.padding, self.dilation = kernel, steps, sides, holes
        self.ceil_mode = bool(ceil_mode)

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank fetches what its outputs read."""
        extents = source.shape[2:]
        if 0 in extents:
            raise ShapeError(f"the global input {source.shape} has no elements to pool")
        outputs = self.balanced(source, self.stencil.outputs(extents))
        self._check_windows(extents, outputs.shape[2:])
        reading = WindowGather(self.site, self.stencil, source, outputs, dtype, self._mode, self._padding)
        box = outputs.box(self.machine.rank)
        return CallPlan(reading.movement, None, reading=reading, box=box, dtype=dtype, extents=extents)

    def _check_windows(self, extents: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        pass

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding},"
            f" dilation={self.dilation}, ceil_mode={self.ceil_mode}, {super().extra_repr()}"
        )


class DistributedAvgPool(_Pool):
    """Average pooling of a tensor that is split over ranks, in batch, channels and space.

    Local input: the shard of this rank, of any size that forms a grid with the others'. Local output: the
    balanced shard of the global output on P_y; where that is P_x the batch stays cut as it is. Collective
    to construct over the machine; a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        As in torch, which has no ``divisor_override`` in one dimension.
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
        grid, the types differ, or the windows do not fit into the global input.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11.
    """

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        if divisor_override == 0:
            raise ShapeError(f"{type(self).__name__}: divisor_override must not be zero")
        super().__init__(P_x, P_y, kernel_size, stride, padding, 1, ceil_mode, name, **callbacks)
        self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor_override

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank fetches what its outputs read, and knows how much of it counts."""
        flow = super().route(source, dtype)
        flow.facts["divisor"] = self._divisor(flow.facts["box"], flow.facts["extents"])
        return flow

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """Sums of the windows by torch, divided by the number of elements that count."""
        divisor = flow.facts["divisor"]
        # torch has a divisor of one's own from two dimensions on.
        lead = (1,) * (2 - self._dims)
        one = isinstance(divisor, int)
        wide = flow.facts["reading"].add_padding(x).to(sum_dtype(x.dtype))
        sums = _AVERAGES[max(self._dims, 2)](
            wide.reshape(*x.shape[:2], *lead, *wide.shape[2:]),
            (*lead, *self.kernel_size),
            (*lead, *self.stride),
            divisor_override=divisor if one else 1,
        ).reshape(flow.facts["box"].shape)
        y: torch.Tensor = sums if one else sums / divisor.to(sums.dtype)
        return y.to(x.dtype)

    def _divisor(self, box: Box, extents: tuple[int, ...]) -> Any:
        # One number if all outputs of this rank have the same, else a tensor of one for each.
        if self.divisor_override is not None:
            return int(self.divisor_override)
        counts = [
            [self._count(window, n, j) for j in range(*bounds)]
            for window, n, bounds in zip(self.stencil.windows, extents, box.bounds[2:], strict=True)
        ]
        if all(len(set(count)) == 1 for count in counts):
            return prod(count[0] for count in counts)
        divisor = torch.ones((), dtype=torch.float64)
        for count in counts:
            divisor = divisor.unsqueeze(-1) * torch.tensor(count, dtype=torch.float64)
        return divisor

    def _count(self, window: Window, n: int, output: int) -> int:
        # As torch: the part of a window behind the right padding never counts.
        start, stop = window.reads(output, output + 1)
        stop = min(stop, n + window.right)
        if not self.count_include_pad:
            start, stop = max(start, 0), min(stop, n)
        return max(stop - start, 1)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{super().extra_repr()}, count_include_pad={self.count_include_pad},"
            f" divisor_override={self.divisor_override}"
        )


class DistributedMaxPool(_Pool):
    """Max pooling of a tensor that is split over ranks, in batch, channels and space.

    Local input: the shard of this rank, of any size that forms a grid with the others'. Local output: the
    balanced shard of the global output on P_y, but where that is P_x the batch stays cut as it is; with
    ``return_indices`` a pair of it and of the positions in the *global* plane, flattened, as the sequential
    layer gives them. Collective to construct over the machine; a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    kernel_size, stride, padding, dilation, return_indices, ceil_mode
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
        grid, the types differ, the windows do not fit into the global input, or one of them reads nothing
        but padding.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11.
    """

    _mode = "constant"
    _padding = float("-inf")

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, kernel_size, stride, padding, dilation, ceil_mode, name, **callbacks)
        self.return_indices = bool(return_indices)
        self._index: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        y = super().forward(input)
        index, self._index = self._index, None
        if not self.return_indices:
            return y
        return y, torch.zeros(y.shape, dtype=torch.int64) if index is None else index

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """The largest elements; the gradient goes to where they were."""
        reading, extents = flow.facts["reading"], flow.facts["extents"]
        padded = reading.add_padding(x.detach())
        places = argmax_windows(padded, self.kernel_size, self.stride, self.dilation)
        places = tuple(p + start for p, start in zip(places, reading.region.start, strict=True))
        if reading.held != reading.region:
            places = self._inside(places, flow.facts["box"], extents)
        if self.return_indices:
            self._index = flat_index(places, extents)
        return gather_at(x, [p - start for p, start in zip(places, reading.held.start, strict=True)])

    def _inside(
        self, places: tuple[torch.Tensor, ...], box: Box, extents: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        # Where all that a window reads is -inf, the padding may have won; torch takes the first input then.
        pairs = list(zip(places, extents, strict=True))
        outside = torch.stack([(place < 0) | (place >= n) for place, n in pairs]).any(0)
        first = [
            torch.tensor([_first_input(window, j) for j in range(*bounds)])
            for window, bounds in zip(self.stencil.windows, box.bounds[2:], strict=True)
        ]
        inputs = torch.meshgrid(*first, indexing="ij")
        return tuple(torch.where(outside, i, p) for i, p in zip(inputs, places, strict=True))

    def _check_windows(self, extents: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        for window, n, m in zip(self.stencil.windows, extents, outputs, strict=True):
            for output in range(m):
                if _first_input(window, output) >= min(n, window.reads(output, output + 1)[1]):
                    raise ShapeError(
                        f"output {output} of {m} reads nothing but padding of the global input {extents}:"
                        f" {self.extra_repr()}"
                    )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{super().extra_repr()}, return_indices={self.return_indices}"


def _first_input(window: Window, output: int) -> int:
    # The first of a window's taps that is not in the left padding.
    start = window.reads(output, output + 1)[0]
    return start + -(min(start, 0) // window.dilation) * window.dilation


class DistributedAvgPool1d(DistributedAvgPool):
    """Distributed ``torch.nn.AvgPool1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedAvgPool2d(DistributedAvgPool):
    """Distributed ``torch.nn.AvgPool2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedAvgPool3d(DistributedAvgPool):
    """Distributed ``torch.nn.AvgPool3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3


class DistributedMaxPool1d(DistributedMaxPool):
    """Distributed ``torch.nn.MaxPool1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedMaxPool2d(DistributedMaxPool):
    """Distributed ``torch.nn.MaxPool2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedMaxPool3d(DistributedMaxPool):
    """Distributed ``torch.nn.MaxPool3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3

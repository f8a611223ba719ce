"""What convolutions and transposed ones share: arguments, partitions, where their weights are."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.conv.arguments import Partitions, stencil_of, torch_layer
from distdl_rma.layers.core.arguments import chosen_placement
from distdl_rma.layers.core.callbacks import callbacks_among
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.layers.core.placement import Placement, block_placement, whole_placement
from distdl_rma.ops.conv.worker_grid import IN, OUT, ConvolutionOptions, WorkerGrid, can_overlap
from distdl_rma.ops.core.operation import Operation

O = TypeVar("O", bound=Operation)  # noqa: E741
# Attributes of torch's layers.
_LIKE = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
    *("transposed", "output_padding", "groups", "padding_mode"),
)
_PLACEMENTS = ("replicated", "root")


class ConvolutionLayer(OperatorLayer[O]):
    """A layer of torch's that slides a kernel, with its partitions and weights."""

    _casts = True
    _dims: ClassVar[int]
    _twin: ClassVar[type[nn.Module]]
    # Which dimension of the work the first dimension of the weight is, and what is printed of the arguments.
    _rows: ClassVar[int]
    _shown: ClassVar[tuple[str, ...]]
    weight: torch.Tensor
    bias: torch.Tensor | None
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def __init__(
        self,
        P_x: Partition,
        *arguments: Any,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        P_w: Partition | None = None,
        placement: str | None = None,
        weights: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        kind, dims = type(self).__name__, self._dims
        named = {"P_y": P_y, "P_W": P_W, "P_w": P_w}
        given, arguments = Partitions.among(kind, dims + 2, (P_x, *arguments), named)
        callbacks = callbacks_among(options)
        placement = chosen_placement(kind, placement, weights, _PLACEMENTS)
        # The torch layer checks its arguments and makes the same initial weights from the same seed.
        like = torch_layer(kind, self._twin, dims, arguments, options)
        stencil, P_y = stencil_of(kind, like), given.P_y or P_x
        grid = given.workers(P_y if self._rows == OUT else P_x, self._rows)
        super().__init__(P_x, P_y, grid, name=name, **callbacks)
        workers = WorkerGrid(grid, self._rows, like.groups, tuple(like.weight.shape))
        overlaps = can_overlap(stencil, like.padding_mode, workers, P_x)
        in_place = given.P_W is None and (self._rows == IN or P_y == P_x)
        self.options = ConvolutionOptions(stencil, workers, like.padding_mode, in_place, overlaps)
        self.P_W, self.placement = given.P_W, placement
        for key in _LIKE:
            setattr(self, key, getattr(like, key))
        values = {"weight": like.weight, "bias": like.bias}
        self.place(values, {key: self._placement(key, p.shape) for key, p in values.items() if p is not None})

    @property
    def weights(self) -> str:
        """Another name for ``placement``."""
        return self.placement

    def _placement(self, key: str, shape: torch.Size) -> Placement:
        workers, pattern, of_weight = self.options.workers, self.placement, key == "weight"
        users = workers.grid if of_weight or self._rows == OUT else self.P_y
        if self.P_W is None:
            return whole_placement(self.machine, self.P_x, users, shape, pattern)
        blocks = workers.blocks() if of_weight else workers.bias(self.out_channels)
        if users is workers.grid:
            return block_placement(blocks, pattern)
        # The owners of the output add the bias of a transposed convolution, wherever they are.
        channels = Balanced(self.out_channels, users.shape[1])
        use = Decomposition(users, (channels,), tuple(0 if d == 1 else None for d in range(users.dim)))
        return Placement(block_placement(blocks, pattern).store, use)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        shown = {key: getattr(self, key) for key in self._shown} | {"bias": self.bias is not None}
        shown |= {key: P.shape for key in ("P_x", "P_y", "P_W") if (P := getattr(self, key)) is not None}
        if self.placement != _PLACEMENTS[0]:
            shown["placement"] = self.placement
        settings = ", ".join(f"{key}={value!r}" for key, value in shown.items())
        return f"{self.in_channels}, {self.out_channels}, {settings}"

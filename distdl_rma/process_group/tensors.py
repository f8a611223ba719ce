"""Tensors of a call as flat arrays, and what a call cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.process_group.reducers import _STORAGE

Array = NDArray[Any]


class Flat:
    """A tensor as a flat array, and its way back where it is not contiguous."""

    __slots__ = ("_contiguous", "_tensor", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._tensor = tensor.detach()
        self._contiguous = self._tensor if self._tensor.is_contiguous() else self._tensor.contiguous()

    @property
    def bytes(self) -> Array:
        """All bytes, in the order of the elements."""
        flat: Array = self._contiguous.reshape(-1).view(torch.uint8).numpy()
        return flat

    @property
    def elements(self) -> Array:
        """All elements, as they are reduced."""
        kind = np.dtype(_STORAGE[self.tensor.dtype])
        return self.bytes.view(kind)

    def store(self) -> None:
        """Put what was written to the array into the tensor, where that is another memory."""
        if self._contiguous is not self._tensor:
            self._tensor.copy_(self._contiguous)


def check(tensors: Sequence[torch.Tensor], who: str) -> None:
    """Raise ``UnsupportedError`` for tensors that are not dense, or not in the memory of the processor."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{who}: backend 'rma' is for tensors on cpu, got one on {tensor.device}; move it, or use"
                " another backend for that device, as in init_process_group('cpu:rma,cuda:nccl')"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnsupportedError(f"{who}: tensors are dense, got {tensor.layout}; use tensor.to_dense()")


def single(tensors: Sequence[torch.Tensor], who: str) -> torch.Tensor:
    """The only tensor of a list, as calls for one device per process have it."""
    if len(tensors) != 1:
        raise ShapeError(f"{who}: takes one tensor per rank, got {len(tensors)}")
    return tensors[0]


def facts(tensors: Sequence[torch.Tensor]) -> str:
    """Sizes and types, as all ranks have to give them."""
    said = [f"{t.numel()} x {str(t.dtype).removeprefix('torch.')}" for t in tensors]
    if len(said) > 1 and len(set(said)) == 1:
        return f"{len(said)} times {said[0]}"
    if len(said) > 4:
        return f"{', '.join(said[:3])}, ... ({len(said)}, {sum(t.numel() for t in tensors)} in all)"
    return ", ".join(said) or "no tensors"


def same_type(tensors: Sequence[torch.Tensor], who: str) -> None:
    """Raise ``ShapeError`` if tensors are of several types."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise ShapeError(f"{who}: tensors are of one type, got {sorted(map(str, types))}")

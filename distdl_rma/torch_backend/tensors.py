"""Arguments of calls: tensors as flat arrays, reductions of torch, and checks of both.

Everything below this file knows numpy arrays of one dimension only. A tensor becomes one without a copy if
its elements are contiguous; else its contiguous copy travels, and ``store`` brings a result back::

    tensor                     array                    back
    contiguous                 its memory               nothing to do
    transposed, conjugated     that of a copy           copied into the tensor at the end
    bfloat16, float16, ...     words of the same size   the same words
    expand(), overlapping      none, if it is filled    refused: two elements in one place cannot differ
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.dtypes import BIT_WORDS, NUMPY
from distdl_rma.segments.collectives.reduction import Array, Element, Reduction

# These move as words of their size: numpy has no type for them, or is slow with it.
_AS_WORDS = {torch.float16, torch.bfloat16}
_AS_WORDS |= {
    kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and "float8" in str(kind)
}

# Torch's names, and those of the segments, by the hash of torch's operation: it has two types for one, with
# equal hashes, which are read faster than the operations are compared.
OPERATIONS = {
    hash(getattr(ReduceOp, name.upper())): (name, {"avg": "mean", "product": "prod"}.get(name, name))
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}

# Why a tensor cannot be filled.
OVERLAP = "elements of a tensor that is filled share memory, as after expand(); call contiguous()"


class Flat:
    """A tensor as a flat array of its ``elements``, in their order; ``store`` writes a copy back.

    Floats of 16 bits are words of 16 bits. ``UnsupportedError`` for tensors without such memory, such as a
    DTensor: its part is ``to_local()``.
    """

    __slots__ = ("_copied", "_tensor", "elements", "overlaps")

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self._tensor = self._copied = tensor
        # Whether one place in memory is several elements, which cannot differ: torch stores nothing into it.
        self.overlaps = False
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self._copied = tensor.resolve_conj().resolve_neg().contiguous()
            self.overlaps = _overlaps(tensor)
        words = self._copied
        if words.dtype in _AS_WORDS:
            words = words.view(BIT_WORDS[words.itemsize][0])
        try:
            self.elements = _array_of(words)
        except (RuntimeError, TypeError) as error:
            what = f"a {type(tensor).__name__} of {tensor.dtype}"
            raise UnsupportedError(f"tensors of elements in memory are taken, got {what}: {error}") from error

    @property
    def bytes(self) -> Array:
        """All bytes, in the order of the elements."""
        return self.elements.view(np.uint8)

    def store(self) -> None:
        """Copy the array into the tensor, if they have different memory."""
        if self._copied is not self._tensor:
            self._tensor.copy_(self._copied)


def _overlaps(tensor: torch.Tensor) -> bool:
    # Whether elements share memory, or seem to: a step is not longer than what the steps below it reach.
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False


# Bytes from some address on. torch's numpy() would forbid to resize the tensor from then on, but
# FullyShardedDataParallel resizes it between its collectives.
_Memory = ctypes.c_char * sys.maxsize


def array_at(address: int, dtype: np.dtype[Any], count: int, owner: object = None) -> Array:
    """Array of the elements at an address; it keeps the owner of this memory, if that is given."""
    memory: Any = _Memory.from_address(address)
    memory.owner = owner
    return np.frombuffer(memory, dtype, count)


def _array_of(tensor: torch.Tensor) -> Array:
    known = type(tensor) is torch.Tensor and tensor.dtype in NUMPY
    address = tensor.data_ptr() if known else 0
    if not address:
        # It has no elements, a type that numpy lacks, or an address that is hidden.
        return tensor.numpy().reshape(-1)
    return array_at(address, NUMPY[tensor.dtype], tensor.numel(), tensor)


def check(tensors: Sequence[torch.Tensor], who: str) -> None:
    """Raise ``UnsupportedError`` for tensors that are not dense or not in the memory of the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise UnsupportedError(
                f"{who}: backend 'rma' is for tensors on cpu, got one on {tensor.device}; move it, or use"
                " another backend for that device"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedError(f"{who}: tensors are dense, got {tensor.layout}; use tensor.to_dense()")


def single(tensors: Any, who: str) -> Any:
    """The only entry of a list, or the tensor that stands for it; ``ShapeError`` for another length."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ShapeError(f"{who}: takes one tensor per rank, got {len(tensors)}")
    return tensors[0]


def facts(tensors: Sequence[torch.Tensor]) -> str:
    """Sizes and types of tensors as text."""
    texts = [f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} times {texts[0]}"
    if len(texts) > 4:
        return f"{', '.join(texts[:3])}, ... ({len(texts)}, {sum(t.numel() for t in tensors)} in all)"
    return ", ".join(texts) or "no tensors"


def check_alike(tensors: Sequence[torch.Tensor], who: str) -> None:
    """``check``; and raise ``ShapeError`` if tensors are of several types."""
    check(tensors, who)
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise ShapeError(f"{who}: tensors are of one type, got {', '.join(sorted(map(str, types)))}")


def parts_of(whole: torch.Tensor, part: torch.Tensor, ranks: int, who: str) -> list[torch.Tensor]:
    """Equal parts of a tensor, one for each rank and as large as ``part``; views.

    If it is not contiguous, as after a transposition, the parts are rows, unless elements share memory.
    """
    check([part, whole], who)
    if whole.numel() != part.numel() * ranks:
        raise ShapeError(
            f"{who}: {ranks} parts of {part.numel()} elements are not the {whole.numel()} of the whole"
        )
    if not part.numel():
        return [whole.reshape(-1)] * ranks
    if not whole.is_contiguous() and not _overlaps(whole) and not whole.shape[0] % ranks:
        return list(whole.detach().tensor_split(ranks))
    return list(_flat(whole, who).split(part.numel()))


def rows_of(tensor: torch.Tensor, splits: Sequence[int] | None, ranks: int, who: str) -> list[torch.Tensor]:
    """Rows of a contiguous tensor for each rank, by numbers of rows or in equal parts; views."""
    check([tensor], who)
    _flat(tensor, who)
    sizes, rows = list(splits or ()), tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ShapeError(f"{who}: {rows} rows are not equal parts for {ranks} ranks")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ShapeError(f"{who}: {rows} rows for {ranks} ranks, got numbers of rows {sizes}")
    return list(tensor.detach().split(sizes))


def _flat(tensor: torch.Tensor, who: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ShapeError(f"{who}: a tensor that is cut into parts is contiguous; call contiguous()")
    return tensor.detach().reshape(-1)


def reducer_of(op: Any, dtype: torch.dtype, ranks: int, who: str = "a reduction") -> Reduction:
    """Reduction of an operation of torch, a mean by the number of ranks; not for two threads at once.

    ``ShapeError`` or ``UnsupportedError`` if the operation has no exact result. The sum of bool is that of
    ``torch.add``: whether any is true.
    """
    names = OPERATIONS.get(hash(op))
    if names is None:
        known = [name for name, _ in OPERATIONS.values()]
        raise UnsupportedError(f"{who}: a reduction is one of {known}, got {getattr(op, 'op', op)}")
    element = reduction_dtype(dtype)
    if dtype not in NUMPY and not isinstance(element, Element):
        raise UnsupportedError(f"{who}: tensors of {dtype} cannot be reduced")
    if names[0] == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ShapeError(f"{who}: an average of {dtype} is not exact: use sum, or a floating type")
    if isinstance(element, Element):
        # Words of bits: all tensors are shown as these.
        element = replace(element, storage=BIT_WORDS[2][1])
    else:
        element = Element(element, NUMPY[dtype], NUMPY[dtype])
    by_name = "bor" if names[0] == "sum" and dtype == torch.bool else names[1]
    return Reduction(by_name, element, ranks, who)

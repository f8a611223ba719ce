"""Where every element of every tensor lies in the data file, and the checksum of a part of it.

The file is one of safetensors: a head in JSON, then the tensors, whole and in row-major order. Its items
follow from names, dtypes and shapes alone, so that every rank knows all places without a message, whatever it
holds::

    length   head, padded             float64         float32              uint8
    8 bytes  {"weight": ...}          running_mean    bias    weight       mask
                             ^ a multiple of 16: every element is aligned

A rank holds a *part* of an item, the box of its block. A checksum of a tensor must come out the same however
the tensor is cut, since other ranks may read it than have written it. So it is a sum: of each row (the
elements of one first index) as integers, times an odd number of the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from distdl_rma.geometry.box import Box
from distdl_rma.jobs.checkpoints.form import NAMED_DTYPES, dtype_name

# Names of types in safetensors. The format has no types for complex numbers that all its readers know: pairs
# of numbers.
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "complex32": "F16", "complex64": "F32", "complex128": "F64",
}  # fmt: skip
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}
# Of the largest element.
ALIGNED = 16
# Of checksums.
MODULUS = 1 << 64

# What a state records of a tensor: the name of its dtype, and its global shape.
Kind = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Item:
    """One tensor of a checkpoint, whole: its place does not depend on the ranks that write it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def planned(kinds: Mapping[str, Kind], step: int) -> tuple[bytes, list[Item]]:
    """Head of the data file, in the format of safetensors, and the items in the order of their offsets.

    Larger elements come first, so that all elements are aligned without gaps, which safetensors forbids.
    Alike on all ranks for the same arguments. Whoever reads a file computes the places again, and compares
    them with those that its manifest states.
    """
    found = [(name, NAMED_DTYPES[kind], shape) for name, (kind, shape) in kinds.items()]
    found.sort(key=lambda one: (-one[1].itemsize, one[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(step)}}
    begin = 0
    for name, dtype, shape in found:
        end = begin + prod(shape) * dtype.itemsize
        seen = (*shape, 2) if dtype.is_complex else shape
        header[name] = {"dtype": _CODES[dtype_name(dtype)], "shape": seen, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // ALIGNED) * ALIGNED)
    head = len(text).to_bytes(8, "little") + text
    return head, [Item(*one, len(head) + header[one[0]]["data_offsets"][0]) for one in found]


@dataclass(frozen=True)
class Part:
    """The box of an item that some ranks hold.

    Elements are counted in the order of the box: the third element of rows 2 and 3 of a table with two
    columns is the first of row 3. A share of a part, and a piece that is read or written at a time, is a
    range of such numbers, which may begin and end within a row.
    """

    item: Item
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.volume * self.item.dtype.itemsize

    def checksum(self, elements: torch.Tensor, first: int) -> int:
        """Checksum of elements of the box from ``first`` on, given as a flat tensor; modulo 2^64.

        Rows of the tensor are summed as integers, times an odd number that depends on the row. So a change of
        one element changes the sum, and the sums of parts add up to that of the tensor, however it is cut.
        Rows that change places are noticed, elements that do so within one row are not.
        """
        size = self.item.dtype.itemsize
        # numpy sums short integers as long ones several times faster than torch.
        values = elements.numpy().view(_INTEGERS[size])
        per = size // values.itemsize
        width = self.box.volume // self.box.shape[0] * per if self.box.dim else per
        # The elements may begin within a row, and end within one.
        row, inside = divmod(first * per, width)
        row += self.box.start[0] if self.box.dim else 0
        begins = np.arange(-inside, len(values), width).clip(0)
        weights = 2 * np.arange(row, row + len(begins), dtype=np.uint64) + np.uint64(1)
        # A row of one number is its own sum, which numpy would compute several times as slowly.
        sums = np.add.reduceat(values, begins, dtype=np.uint64) if width > 1 else values.astype(np.uint64)
        return int((sums * weights).sum(dtype=np.uint64))

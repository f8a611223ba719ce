"""Element dtypes: their numbers, numpy's dtypes, the words that carry them, and the dtypes of sums.

Segments know numpy only, and numpy has no bfloat16. So tensors are shown to numpy as their bits, in integers
of the same size (``as_words``): enough to copy and to compare. For sums, ``arithmetic.py`` tells the segments
what the bits mean.

Sums of short floats are computed in float32 (``sum_dtype``), as torch's kernels do within one tensor, and
rounded once at the end: a sum over ranks that rounded at each rank would differ from that of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import UnsupportedError


class _Kind(NamedTuple):
    # numpy's type of the same values, None if numpy has none; and the dtype of sums, None for the same dtype.
    numpy: type[np.generic] | None = None
    sums: torch.dtype | None = None


# All dtypes of elements on a CPU. Their numbers travel between ranks: the order is part of the protocol.
_KINDS: dict[torch.dtype, _Kind] = {
    torch.float32: _Kind(np.float32),
    torch.float64: _Kind(np.float64),
    torch.float16: _Kind(np.float16, torch.float32),
    torch.bfloat16: _Kind(None, torch.float32),
    torch.int64: _Kind(np.int64),
    torch.int32: _Kind(np.int32),
    torch.int16: _Kind(np.int16),
    torch.int8: _Kind(np.int8),
    torch.uint8: _Kind(np.uint8),
    # torch does not add these.
    torch.uint16: _Kind(np.uint16, torch.int64),
    torch.uint32: _Kind(np.uint32, torch.int64),
    torch.uint64: _Kind(np.uint64, torch.int64),
    torch.bool: _Kind(np.bool_),
    torch.complex64: _Kind(np.complex64),
    torch.complex128: _Kind(np.complex128),
    torch.complex32: _Kind(None, torch.complex64),
    torch.float8_e4m3fn: _Kind(None, torch.float32),
    torch.float8_e5m2: _Kind(None, torch.float32),
}
DTYPES: tuple[torch.dtype, ...] = tuple(_KINDS)
NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(kind.numpy) for dtype, kind in _KINDS.items() if kind.numpy is not None
}
# Elements travel as bits, in words of an element's size: torch's dtype and numpy's.
BIT_WORDS: dict[int, tuple[torch.dtype, np.dtype[Any]]] = {
    1: (torch.uint8, np.dtype(np.uint8)),
    2: (torch.int16, np.dtype(np.int16)),
    4: (torch.int32, np.dtype(np.int32)),
    8: (torch.int64, np.dtype(np.int64)),
    16: (torch.complex128, np.dtype(np.complex128)),
}
# Of ``digest``: odd numbers, one for each word of a row, and a shift that is no distance between the signs of
# two elements.
_WEIGHTS = np.random.Philox(1).random_raw(1 << 13) | np.uint64(1)
_FOLD = np.uint64(29)
# The words of types that numpy knows.
_WORDS = {dtype: BIT_WORDS[dtype.itemsize][1] for dtype in NUMPY}
_SUMS = {dtype: kind.sums for dtype, kind in _KINDS.items() if kind.sums is not None}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which elements of a dtype are summed."""
    return _SUMS.get(dtype, dtype)


def word_dtype(dtype: torch.dtype, what: str) -> np.dtype[Any]:
    """Numpy dtype of the words that carry elements of a torch dtype; ``what`` is for the error."""
    if dtype not in _KINDS:
        raise UnsupportedError(f"{what}: dtype {dtype} is not supported; use one of {list(DTYPES)}")
    return BIT_WORDS[dtype.itemsize][1]


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether its elements are in memory, that of the process or of a device."""
    return tensor.layout == torch.strided and not tensor.is_meta


# Not empty while memory of tensors moves to disk and back, for which torch resizes it: torch never resizes a
# tensor again of which numpy has had an array. So an array is then made of an address, without torch knowing.
MOVING: list[bool] = []


@contextmanager
def memory_moves() -> Iterator[None]:
    """Context in which arrays of tensors leave these resizable; ``SHOWN`` has those that must not move."""
    MOVING.append(True)
    try:
        yield
    finally:
        MOVING.pop()


class _Shown:
    """Memory of a tensor, for an array that keeps the tensor alive."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        itemsize = words.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (words.data_ptr(), False),
            "shape": tuple(words.shape),
            "strides": tuple(n * itemsize for n in words.stride()),
            "typestr": BIT_WORDS[itemsize][1].str,
        }
        SHOWN.add(self)

    @property
    def storage(self) -> int:
        """Number of the memory, ``_cdata`` of its storage."""
        return int(self._words.untyped_storage()._cdata)


# Memory of which there are arrays, made in ``memory_moves``.
SHOWN: WeakSet[_Shown] = WeakSet()


def as_words(tensor: torch.Tensor) -> NDArray[Any]:
    """Bits of a CPU tensor as numpy words, in its shape; copies only lazy conjugates or negatives."""
    word = _WORDS.get(tensor.dtype)
    if word is not None and not MOVING:
        # Two calls, of which numpy's view takes a third of torch's.
        return tensor.numpy(force=True).view(word)
    plain = tensor.detach() if tensor.requires_grad else tensor
    # A real tensor may be a lazy negative, such as the imaginary part of a conjugate.
    if plain.dtype.is_complex or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    bits = BIT_WORDS[plain.dtype.itemsize][0]
    try:
        words = plain if plain.dtype == bits else plain.view(bits)
        return np.asarray(_Shown(words)) if MOVING else words.numpy()
    except RuntimeError:
        if not plain._is_zerotensor():
            raise
    # A zero tensor of autograd, without memory.
    return as_words(torch.zeros(plain.shape, dtype=plain.dtype))


def as_numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """Elements of a CPU tensor as a numpy array of its dtype, outside of any graph; copied if need be."""
    return as_words(tensor).view(NUMPY[tensor.dtype]) if MOVING else tensor.numpy(force=True)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor in the order of its elements; a view where the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # As a vector: the strides of a dimension of one element are any numbers.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes, by which ranks compare what they hold; local.

    It is that of weighted sums of words, 64 KiB at a time, which takes a fraction of the time of a digest of
    the bytes. A change of one word always changes it, and other changes but for one in 2^64. It is no
    protection from who wants to deceive, and not written to files, so that another version may have another.
    """
    found = as_words(flat_bytes(tensor).cpu())
    rows = found[: len(found) // _WEIGHTS.nbytes * _WEIGHTS.nbytes].view(np.uint64).reshape(-1, len(_WEIGHTS))
    # Upper bits are folded into lower ones: a sum of words would lose an even number of changed signs.
    sums = [((row ^ (row >> _FOLD)) * _WEIGHTS).sum(dtype=np.uint64) for row in rows]
    return sha256(np.array(sums, np.uint64).tobytes() + found[rows.nbytes :].tobytes()).hexdigest()

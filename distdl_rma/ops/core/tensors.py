"""The one adaptor between torch tensors and the numpy arrays of the segments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.errors import UnsupportedError

# All types of elements on a CPU. Code numbers travel between ranks, so the order is part of the protocol.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Dimensions of a tensor that ranks can tell each other of.
MAX_DIMS = 8
# What moves is bits: words of the same size, as torch and as numpy know them.
_WORDS: dict[int, tuple[torch.dtype, Any]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
    16: (torch.complex128, np.complex128),
}
# Types that are too short to be summed in, or that torch does not add: summed in another one.
_SUM_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def numpy_dtype(dtype: torch.dtype, what: str) -> np.dtype[Any]:
    """Numpy type of the words that carry a torch type between ranks.

    ``UnsupportedError`` if the type has no elements of its own on a CPU; names ``what`` it was for.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(f"{what}: dtype {dtype} is not supported; use one of {list(DTYPES)}")
    words: np.dtype[Any] = np.dtype(_WORDS[dtype.itemsize][1])
    return words


def reduction_dtype(dtype: torch.dtype) -> npt.DTypeLike | str:
    """Name by which the reductions of the segments know a torch type."""
    return str(dtype).removeprefix("torch.")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which elements of a type are summed."""
    return _SUM_DTYPES.get(dtype, dtype)


def trouble_with(x: object, what: str = "input") -> str:
    """What keeps a value from being a shard that can move; empty if nothing does."""
    if not isinstance(x, torch.Tensor):
        return f"{what} is of type {type(x).__name__}, wanted a tensor"
    if x.layout is not torch.strided or x.is_nested:
        return f"{what} has layout {'nested' if x.is_nested else x.layout}, wanted a dense tensor"
    if x.device.type != "cpu":
        return f"{what} is on device {x.device}, wanted a tensor on the CPU"
    if x.dtype not in DTYPES:
        return f"{what} has the unsupported dtype {x.dtype}, wanted one of {list(DTYPES)}"
    return f"{what} has {x.dim()} dimensions, wanted at most {MAX_DIMS}" if x.dim() > MAX_DIMS else ""


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Numpy view of a CPU tensor; no copy, no autograd. bfloat16 becomes uint16 words."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[Any] = tensor.detach().numpy()
    return array


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Tensor view of an array, for instance of a segment buffer, as a type of the same size; no copy."""
    tensor = torch.from_numpy(array)
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def as_words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Bits of a CPU tensor as numpy words, in its shape; no copy, but of lazy conjugates or negatives."""
    # A real tensor may be a lazy negative too: the imaginary part of a conjugate.
    plain = tensor.detach().resolve_conj().resolve_neg()
    word = _WORDS[plain.dtype.itemsize][0]
    array: npt.NDArray[Any] = (plain if plain.dtype == word else plain.view(word)).numpy()
    return array


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast as torch's autocast does for operations that gain from a shorter type; as they are without it."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    castable = (torch.float32, torch.float16, torch.bfloat16)
    # What is no tensor is refused later, by all ranks at once.
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in castable else t for t in tensors)


def no_autocast() -> AbstractContextManager[object]:
    """Context without torch's autocast; free where that is off, as entering one without is not."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def zero_volume_tensor(
    b: int | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """Tensor without elements, which ranks without work pass and receive.

    Parameters
    ----------
    b
        Batch size; the shape is (0,) if None, else (b, 0).
    dtype, requires_grad
        As in torch.
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)

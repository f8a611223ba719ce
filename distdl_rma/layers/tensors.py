"""The one adaptor between torch tensors and the numpy arrays of the segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.errors import UnsupportedError

__all__ = ["as_array", "as_tensor", "numpy_dtype", "zero_volume_tensor"]

# torch types that numpy has; code numbers travel between ranks, so the order is part of the protocol.
DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}


def numpy_dtype(dtype: torch.dtype, what: str) -> np.dtype[Any]:
    """Numpy type of a torch type.

    Raises
    ------
    UnsupportedError
        If numpy has no such type; names ``what`` it was for.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(f"{what}: dtype {dtype} is not supported yet; use one of {list(DTYPES)}")
    kind: np.dtype[Any] = np.dtype(DTYPES[dtype])
    return kind


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Numpy view of a CPU tensor; no copy, no autograd."""
    array: npt.NDArray[Any] = tensor.detach().numpy()
    return array


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Tensor view of an array, for instance of a segment buffer; no copy."""
    return torch.from_numpy(array)


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

"""Adaptor between torch tensors and the numpy arrays of the segments.

Segments know no torch: they move and reduce numpy arrays. Views in both directions share the memory. numpy
has no bfloat16: its 16 bits travel as an unsigned integer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray

from distdl_rma.layers.dtypes import DTYPES, MOVING, as_numbers

# Most dimensions of a tensor: messages between ranks hold this many extents.
MAX_DIMS = 8


def problem_with(x: object, what: str = "input") -> str:
    """Reason why a value cannot be a shard that moves; empty if it can."""
    if not isinstance(x, torch.Tensor):
        return f"{what} is of type {type(x).__name__}, wanted a tensor"
    if x.layout is not torch.strided or x.is_nested:
        return f"{what} has layout {'nested' if x.is_nested else x.layout}, wanted a dense tensor"
    if x.is_meta:
        return f"{what} is on device {x.device}, wanted a tensor with memory"
    if x.dtype not in DTYPES:
        return f"{what} has the unsupported dtype {x.dtype}, wanted one of {list(DTYPES)}"
    return f"{what} has {x.dim()} dimensions, wanted at most {MAX_DIMS}" if x.dim() > MAX_DIMS else ""


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Numpy view of a CPU tensor; no copy, no autograd. bfloat16 becomes uint16 words."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return as_numbers(tensor) if MOVING else tensor.detach().numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Tensor view of an array, for example of a segment buffer, as a type of the same size; no copy."""
    tensor = torch.from_numpy(array)
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


# Whether torch's autocast is on for any type of device.
AUTOCASTS: Callable[[], bool] = torch._C._is_any_autocast_enabled
_NOTHING = nullcontext()


def no_autocast() -> AbstractContextManager[object]:
    """Context without torch's autocast of any device; where that is off, it costs nothing."""
    return torch._C._DisableAutocast() if AUTOCASTS() else _NOTHING


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Tensor without elements for ranks outside of a partition: (b, 0) with batch size ``b``, else (0,).

    Examples
    --------
    >>> zero_volume_tensor().shape, zero_volume_tensor(2).shape
    (torch.Size([0]), torch.Size([2, 0]))
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device=device)

"""New tensors of another's type and device: those that are told their size are plain, alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.split.calls.table import rule
from distdl_rma.split.tensor import SplitTensor, local_of, refused, tensors_in

_T: Any = torch.Tensor


@rule(
    "creation",
    _T.new_empty,
    _T.new_zeros,
    _T.new_ones,
    _T.new_full,
    _T.new_tensor,
    _T.new,
    _T.new_empty_strided,
)
def new_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A plain tensor of the size that is asked for, the same on every rank; it is cut where it is used."""
    x, *others = args
    if any(isinstance(y, SplitTensor) and y.is_split for y in tensors_in(*others, kwargs)):
        raise refused(func, "the values are on many ranks")
    values = [local_of(y) if isinstance(y, SplitTensor) else y for y in others]
    return func(x._local, *values, **kwargs)  # type: ignore[no-any-return]

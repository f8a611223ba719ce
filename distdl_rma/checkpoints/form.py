"""Values of a state as JSON, without pickle; tensors are named in it, and lie in the data file."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from distdl_rma.dtypes import DTYPES, NUMPY, is_in_memory
from distdl_rma.errors import UnsupportedError

# Returns what stands for a tensor in the JSON, by the tensor's name.
Take = Callable[[str, torch.Tensor], Any]
_PLAIN = (bool, int, float, str, type(None))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in files, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


NAMED_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if a checkpoint can hold it; else ``UnsupportedError``."""
    if not is_in_memory(tensor) or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"checkpoint: {name!r} is {tensor.layout} of {tensor.dtype} on {tensor.device}; dense tensors on"
            f" the CPU of {[*NAMED_DTYPES]} can be saved"
        )
    return tensor


def encode(value: Any, name: str, take: Take) -> Any:  # noqa: PLR0911 - a table of types
    """Value in JSON's types; ``take`` gets its tensors. ``UnsupportedError`` names a part without a form.

    Lists are lists. Other containers and values are objects with one key, their type.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return take(name, checked(name, value))
    if isinstance(value, np.generic) and (value.dtype.kind in "SU" or value.dtype in NUMPY.values()):
        return encode(value.item(), name, take)
    if type(value) in (np.ndarray, np.memmap) and value.dtype in NUMPY.values():
        return {"array": take(name, torch.from_numpy(np.asarray(value, order="C")))}
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        parts = sorted(value) if isinstance(value, (set, frozenset)) else value
        inside = [encode(part, f"{name}/{at}", take) for at, part in enumerate(parts)]
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        return inside if kind == "list" else {kind: inside}
    if isinstance(value, dict):
        # Keys may be numbers, and their order counts.
        pairs = [[encode(k, name, take), encode(v, f"{name}/{k}", take)] for k, v in value.items()]
        return {"Counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    raise UnsupportedError(
        f"checkpoint: {name!r} is a {type(value).__name__}, which has no form without pickle; its owner's"
        " state_dict() may have numbers, strings, lists, dicts, arrays and tensors"
    )


def in_line(tensor: torch.Tensor) -> Any:
    """A tensor of one real number, in the JSON itself."""
    return {"scalar": [dtype_name(tensor.dtype), tensor.item()]}


def decode(form: Any, give: Callable[[str], torch.Tensor]) -> Any:
    """The value of a form; ``give`` returns the tensor of a name."""
    if isinstance(form, list):
        return [decode(part, give) for part in form]
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = form.items()
    if kind in ("dict", "Counter"):
        pairs = {decode(key, give): decode(value, give) for key, value in inside}
        return Counter(pairs) if kind == "Counter" else pairs
    return _VALUES[kind](inside, give)


_VALUES: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "tensor": lambda inside, give: give(inside),
    "array": lambda inside, give: decode(inside, give).numpy(),
    "scalar": lambda inside, give: torch.tensor(inside[1], dtype=NAMED_DTYPES[inside[0]]),
    "tuple": lambda inside, give: tuple(decode(inside, give)),
    "set": lambda inside, give: set(decode(inside, give)),
    "frozenset": lambda inside, give: frozenset(decode(inside, give)),
    "bytes": lambda inside, give: base64.b64decode(inside),
    "complex": lambda inside, give: complex(*inside),
    "dtype": lambda inside, give: getattr(torch, inside),
}


def tensors_in(form: Any) -> Iterator[str]:
    """Names of the tensors in a form."""
    # Forms by the names of parameters are dicts too, and a parameter may be called so.
    if isinstance(form, dict) and isinstance(form.get("tensor"), str):
        yield form["tensor"]
    elif isinstance(form, (dict, list)):
        for part in form.values() if isinstance(form, dict) else form:
            yield from tensors_in(part)

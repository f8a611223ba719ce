"""Values of a state as JSON, without pickle; tensors are named in it, and lie in the data file.

A form is what JSON has: numbers, texts, None and lists stand for themselves. All else is an object with one
key, which says the type::

    {"lr": 0.1, "betas": (0.9, x)}   with x a tensor, in the entry "optimizer"

    {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, {"tensor": "optimizer/betas/1"}]}]]}

A checkpoint is a file that people send each other, and a pickle runs whatever its writer wants. So types come
from closed tables, and what has no form is refused when it is saved, where the user can still change it.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.dtypes import DTYPES, NUMPY, is_readable

# Returns what stands for a tensor in the JSON, by the tensor's name; whoever calls ``encode`` decides which
# tensors go to the data file and which, few numbers, into the JSON.
Take = Callable[[str, torch.Tensor], Any]
_PLAIN = (bool, int, float, str, type(None))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in files, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


NAMED_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
# As values of a state; a table, since a file must not name other things of torch.
_AS_VALUES = {dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_SEQUENCES: dict[str, type[Any]] = {each.__name__: each for each in (tuple, set, frozenset, torch.Size)}
_DICTS: dict[str, type[Any]] = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict)}
_FACTORIES: dict[str, type[Any]] = {each.__name__: each for each in (list, dict, set, int, float, str, bool)}
_SIMPLE: dict[type[Any], Callable[[Any], Any]] = {
    bytes: lambda value: base64.b64encode(value).decode(),
    complex: lambda value: [value.real, value.imag],
    torch.dtype: dtype_name,
}
# Kinds of numpy's dtypes whose elements are bytes without references: an array of these may be made of the
# bytes of a file, one of objects would take them for addresses.
_OF_BYTES = "biufcSUMm"


def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if a checkpoint can hold it; else ``UnsupportedError``."""
    if not is_readable(tensor) or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"checkpoint: {name!r} is {tensor.layout} of {tensor.dtype} on {tensor.device}; dense tensors"
            f" with memory, of {[*NAMED_DTYPES]}, can be saved"
        )
    return tensor


def encode(value: Any, name: str, take: Take) -> Any:  # noqa: C901, PLR0911 - a table of types
    """Value in JSON's types; ``take`` gets its tensors. ``UnsupportedError`` names a part without a form.

    Lists are lists. Other containers and values are objects with one key, their type. Types are compared, not
    asked for by ``isinstance``: of a subclass, such as a named tuple, only a plain value would come back.

    Examples
    --------
    >>> encode({"lr": 0.1, 3: (1 + 2j,)}, "state", lambda name, tensor: {"tensor": name})
    {'dict': [['lr', 0.1], [3, {'tuple': [{'complex': [1.0, 2.0]}]}]]}
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return take(name, checked(name, value))
    if isinstance(value, np.generic) and value.dtype.kind in _OF_BYTES:
        return {"number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "O" + _OF_BYTES:
        return _array(value, name, take)
    if kind is np.ma.MaskedArray and value.dtype.kind not in "OSUV":
        parts = {"data": value.data, "mask": np.ma.getmaskarray(value), "fill_value": value.fill_value}
        return {"masked": encode(parts | {"hard_mask": bool(value.hardmask)}, name, take)}
    if kind in (set, frozenset):
        # Their order differs between ranks.
        return {kind.__name__: sorted((encode(part, name, take) for part in value), key=json.dumps)}
    if kind is list or _SEQUENCES.get(kind.__name__) is kind:
        inside = [encode(part, f"{name}/{at}", take) for at, part in enumerate(value)]
        return inside if kind is list else {kind.__name__: inside}
    if _DICTS.get(kind.__name__) is kind:
        # Keys may be numbers, and their order counts.
        pairs: list[Any] = [[encode(k, name, take), encode(v, f"{name}/{k}", take)] for k, v in value.items()]
        made = getattr(value, "default_factory", None)
        if made is None or made in _FACTORIES.values():
            return {kind.__name__: [made and made.__name__, pairs] if kind is defaultdict else pairs}
    if kind in _SIMPLE:
        return {kind.__name__: _SIMPLE[kind](value)}
    raise UnsupportedError(
        f"checkpoint: {name!r} is a {kind.__name__}, which has no form without pickle; its owner's"
        " state_dict() may have numbers, strings, lists, dicts, arrays and tensors; generators of random"
        " numbers and objects with state_dict() are entries of the state itself"
    )


def _array(value: np.ndarray[Any, Any], name: str, take: Take) -> Any:
    if value.dtype in NUMPY.values():
        return {"array": take(name, torch.from_numpy(np.asarray(value, order="C")))}
    if value.dtype.hasobject:
        return {"objects": [list(value.shape), encode(value.ravel().tolist(), name, take)]}
    # torch has no such elements: other orders of bytes, texts, dates.
    words = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return {"elements": [value.dtype.str, list(value.shape), take(name, words)]}


def in_line(tensor: torch.Tensor) -> Any:
    """A tensor of few real numbers, in the JSON itself, where it costs less than an item of the data file."""
    return {"scalar": [dtype_name(tensor.dtype), tensor.tolist()]}


def decode(form: Any, give: Callable[[str], torch.Tensor]) -> Any:
    """The value of a form; ``give`` returns the tensor of a name. Errors of Python if it is no form.

    The caller turns these into one of the library that names the entry: a damaged file and a newer one have
    many ways to be no form.
    """
    if isinstance(form, list):
        return [decode(part, give) for part in form]
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = form.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(inside, give))
    if kind in _DICTS:
        made, pairs = inside if kind == "defaultdict" else (None, inside)
        found = {decode(key, give): decode(value, give) for key, value in pairs}
        return _DICTS[kind](*[made and _FACTORIES[made]] * (kind == "defaultdict"), found)
    return _VALUES[kind](inside, give)


def _elements(memory: Any, name: str, shape: Any = ()) -> np.ndarray[Any, Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _OF_BYTES:
        raise ValueError(f"elements of {dtype}")
    return np.ndarray(tuple(shape), dtype, memory)


_VALUES: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "tensor": lambda inside, give: give(inside),
    "array": lambda inside, give: decode(inside, give).numpy(),
    "elements": lambda inside, give: _elements(decode(inside[2], give).numpy(), *inside[:2]),
    "number": lambda inside, give: _elements(base64.b64decode(inside[1]), inside[0])[()],
    "objects": lambda inside, give: np.fromiter(decode(inside[1], give), object).reshape(inside[0]),
    "masked": lambda inside, give: np.ma.MaskedArray(**decode(inside, give)),
    "scalar": lambda inside, give: torch.tensor(inside[1], dtype=NAMED_DTYPES[inside[0]]),
    "bytes": lambda inside, give: base64.b64decode(inside, validate=True),
    "complex": lambda inside, give: complex(*inside),
    "dtype": lambda inside, give: _AS_VALUES[inside],
}


def tensors_in(form: Any) -> Iterator[str]:
    """Names of the tensors in a form."""
    # Forms by the names of parameters are dicts too, and a parameter may be called so.
    if isinstance(form, dict) and isinstance(form.get("tensor"), str):
        yield form["tensor"]
    elif isinstance(form, (dict, list)):
        for part in form.values() if isinstance(form, dict) else form:
            yield from tensors_in(part)

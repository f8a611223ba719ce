"""What a rank passes to functions of torch beside split tensors: numbers, words, and plain tensors.

All ranks pass the same, or each of them computes something else.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from distdl_rma.dtypes import as_words, is_in_memory

# What is compared as it is.
SCALAR_TYPES = frozenset({int, float, bool, complex, str, type(None)})
# Of tensors, their layouts say what has to be said; the class of split ones is added.
TENSORS: set[Any] = {torch.Tensor, nn.Parameter}
_PLAIN: frozenset[Any] = frozenset(TENSORS)
_CONTAINERS: frozenset[Any] = frozenset({tuple, list, dict})
# Of tensors that a model holds.
COMPARED = "_distdl_rma_held"
# Tuples of them, as strides are, that were met before: what is equal may be told apart by its type.
_KNOWN: set[tuple[Any, ...]] = set()
_MOST_KNOWN = 1 << 12
# Without references, which depend on how often an object is used elsewhere.
_VERSION = 2
# Elements of a plain tensor.
_SAMPLED = 256
# Rows of so many elements that are added up at a time.
_ROWS, _SUMS = 1 << 12, "sums"
# Of the last bit of a sum.
_BITS = 64
_PAIR = 2


def mark_compared(x: torch.Tensor, compared: bool) -> None:
    """Mark a tensor that ``ReplicaSampler`` compares between ranks, so that calls of functions do not."""
    if compared:
        setattr(x, COMPARED, True)
    else:
        x.__dict__.pop(COMPARED, None)


def said_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """All of some arguments that are no tensors, and the plain tensors that no model holds."""
    words: list[Any] = []
    plain: list[torch.Tensor] = []
    # Without calls for what most functions are given.
    for one in args:
        kind = one.__class__
        if kind in SCALAR_TYPES:
            words += (one,)
        elif kind in _PLAIN:
            if COMPARED not in one.__dict__:
                plain += (one,)
        elif kind not in TENSORS:
            try:
                known = kind is tuple and one in _KNOWN
            except TypeError:
                # Slices, and lists, are not hashable.
                known = False
            words += (one if known else plainly(one),)
            if not known and kind in _CONTAINERS:
                plain += _plain_within(one)
    if kwargs:
        _add_named(kwargs, words, plain)
    return words, plain


def _add_named(kwargs: Mapping[str, Any], words: list[Any], plain: list[torch.Tensor]) -> None:
    for key, one in kwargs.items():
        kind = one.__class__
        if kind in SCALAR_TYPES:
            words += ([key, one],)
        elif kind in _PLAIN:
            plain += () if COMPARED in one.__dict__ else (one,)
        elif kind not in TENSORS:
            words += ([key, plainly(one)],)
            plain += _plain_within(one) if kind in _CONTAINERS else ()


def _plain_within(argument: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in argument.values() if argument.__class__ is dict else argument:
        if one.__class__ in _PLAIN:
            found += () if COMPARED in one.__dict__ else (one,)
        elif one.__class__ in _CONTAINERS:
            found += _plain_within(one)
    return found


def plainly(argument: Any) -> Any:
    """An argument without tensors, in words and numbers, and lists of them."""
    kind = argument.__class__
    if kind in SCALAR_TYPES:
        return argument
    if kind is slice:
        argument = argument.start, argument.stop, argument.step
    if isinstance(argument, Mapping):
        argument = [*argument, *argument.values()]
    if kind is tuple and all(one.__class__ in SCALAR_TYPES for one in argument):
        # Known or not, it is said alike: other ranks may have met others.
        _KNOWN.add(argument) if len(_KNOWN) < _MOST_KNOWN else None
        return argument
    if isinstance(argument, (tuple, list)):
        return [*map(plainly, argument)]
    if isinstance(argument, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return str(argument)
    if isinstance(argument, (np.generic, np.ndarray)):
        return _array(argument) if argument.ndim else plainly(argument.item())
    return kind.__name__


def _array(argument: Any) -> list[Any]:
    # As an index is one.
    number = 0 if argument.dtype.hasobject else crc32(argument.tobytes())
    return [argument.dtype.str, *argument.shape, number]


def spoken(words: Sequence[Any]) -> str:
    """What was said, for messages: without tensors, which are ``...``, and keywords that are None."""
    found = []
    for word in words:
        if isinstance(word, list) and len(word) == _PAIR and isinstance(word[0], str):
            found += [f"{word[0]}={word[1]!r}"] if word[1] is not None else []
        elif word is not ...:
            found.append(repr(word))
    return f" with {', '.join(found)}" if found else ""


def number_of(words: Any, before: int = 0) -> int:
    """Of words and lists of them a number, alike on ranks that say the same; and of what was said before."""
    return crc32(marshal.dumps(words, _VERSION), before)


def sample(x: torch.Tensor, at: int = 0) -> int:
    """Number of some elements of a plain tensor, of others for another number; local."""
    return crc32(some_of(x, at))


def some_of(x: torch.Tensor, at: int = 0) -> bytes:
    """Some elements of a plain tensor, of others for another number; local."""
    dims, total = x.dim(), x.numel()
    if not (is_in_memory(x) and total):
        return b""
    if not dims or total <= _SAMPLED or x.is_contiguous():
        flat = x.detach().reshape(-1)
        stride = max(1, total // _SAMPLED)
        # Numpy takes a copy: memory that it has shown is not resizable any more.
        return as_words(flat[at % stride :: stride].clone()).tobytes()
    # All of it would be copied.
    steps = [ceil(n / _SAMPLED ** (1 / dims)) for n in x.shape]
    some = x.detach()[tuple(slice(at % step, None, step) for step in steps)]
    return as_words(some.clone()).tobytes()


def all_of(x: torch.Tensor) -> tuple[str, bytes]:
    """Of all elements of a plain tensor some sums, which rounding changes little, and how to read them.

    Of integers a number, which any change changes; of a small tensor the elements.
    """
    if not is_in_memory(x) or x.numel() <= _SAMPLED:
        return str(x.dtype), some_of(x)
    flat = x.detach().reshape(-1)
    if not (x.is_floating_point() or x.is_complex()):
        return "torch.int64", crc32(as_words(flat.clone()).tobytes()).to_bytes(8, sys.byteorder)
    if x.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    sums = torch.zeros(_SAMPLED, dtype=torch.float64, device="cpu")
    # Each row counts otherwise, for elements that change places.
    weights = 1 + torch.arange(_ROWS, dtype=torch.float64, device="cpu").unsqueeze(1) / _ROWS
    for at, part in enumerate(flat.split(_ROWS * _SAMPLED)):
        finite = part.double().nan_to_num(3.0, 5.0, -7.0)
        rows = nn.functional.pad(finite, (0, -len(part) % _SAMPLED)).view(-1, _SAMPLED)
        sums += (1 + at / _ROWS) * (weights[: len(rows)] * rows).sum(0)
    return _SUMS, sums.numpy().tobytes()


def values_of(form: str, data: bytes) -> list[float]:
    """The numbers that ``some_of`` and ``all_of`` gave as bytes of this form."""
    dtype = torch.float64 if form == _SUMS else _dtype(form)
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    real = torch.view_as_real(found).reshape(-1) if dtype.is_complex else found
    values: list[float] = (real.double() if dtype.is_floating_point else real).tolist()
    return values


def are_apart(dtype: str, form: str, first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether values of a tensor of this type differ by more than rounding explains.

    That is half of the digits of an element, and a few of the last bits of a sum.
    """
    kind = _dtype(dtype)
    if not (kind.is_floating_point or kind.is_complex) or len(first) != len(other):
        return [*first] != [*other]
    one, two = (torch.tensor([*each], dtype=torch.float64) for each in (first, other))
    largest = max((abs(v) for v in (*first, *other) if isfinite(v)), default=0.0)
    eps = torch.finfo(kind).eps
    rounding = _BITS * eps if form == _SUMS else eps**0.5
    return not torch.allclose(one, two, 0.0, largest * rounding, equal_nan=True)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found

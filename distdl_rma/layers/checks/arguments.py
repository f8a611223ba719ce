"""Numbers, strings and plain tensors in calls of torch's functions, which must be equal on all ranks.

Two ways to make something comparable out of an argument:

    numbers, texts, tuples, dtypes ...   words: JSON-like values that ``marshal`` writes alike on all ranks,
                                         so that a checksum of all of a call is one number
    plain tensors                        bytes: some elements (``sample_of``) or sums of all (``summary_of``)

Words must be equal. Tensors may differ by rounding, as where they are computed of weights by ranks that sum
in another order. So if their bytes differ, the numbers in them are compared with a tolerance
(``differ_beyond_rounding``), and only then is anything an error.

Split tensors are neither: their layouts were compared where they came in.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from math import ceil, isfinite
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from distdl_rma.layers.dtypes import as_words, is_readable
from distdl_rma.layers.staging import down

# Types whose values are compared without conversion.
SCALAR_TYPES = frozenset({int, float, bool, complex, str, type(None)})
# Tensors are not compared as words. ``SplitTensor`` adds its class.
TENSORS: set[Any] = {torch.Tensor, nn.Parameter}
_PLAIN: frozenset[Any] = frozenset(TENSORS)
# Attribute of tensors that a model holds.
COMPARED = "_distdl_rma_held"
# Version of marshal without references, which depend on an object's reference count.
_VERSION = 2
# Number of elements of a plain tensor that are compared.
_SAMPLED = 256
# Number of rows, each of _SAMPLED elements, that are summed at a time; form of the sums.
_ROWS, _SUMS = 1 << 12, "sums"
# Tolerance of sums, in units of their type's epsilon.
_SUM_TOLERANCE = 64


def mark_compared(x: torch.Tensor, compared: bool) -> None:
    """Mark a tensor that ``ReplicaSampler`` compares, so that function calls do not compare it again."""
    if compared:
        setattr(x, COMPARED, True)
    else:
        x.__dict__.pop(COMPARED, None)


def comparable_parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Arguments that are not tensors, as words; and the plain tensors that no model holds.

    The word of a keyword argument is a dict of one item.
    """
    words = [as_comparable(one) for one in args if one.__class__ not in TENSORS]
    words += [{key: as_comparable(one)} for key, one in kwargs.items() if one.__class__ not in TENSORS]
    return words, _plain_within((*args, kwargs))


def _plain_within(argument: Any) -> list[torch.Tensor]:
    # Plain tensors in lists, tuples and dicts.
    found: list[torch.Tensor] = []
    for one in argument.values() if isinstance(argument, dict) else argument:
        if one.__class__ in _PLAIN:
            found += () if COMPARED in one.__dict__ else (one,)
        elif isinstance(one, (tuple, list, dict)):
            found += _plain_within(one)
    return found


def as_comparable(argument: Any) -> Any:
    """Convert an argument to numbers, strings and lists; of a tensor only the name of its type remains."""
    kind = argument.__class__
    if kind in SCALAR_TYPES:
        return argument
    if kind is slice:
        argument = argument.start, argument.stop, argument.step
    if isinstance(argument, Enum):
        argument = kind.__name__, argument.value
    if isinstance(argument, Mapping):
        argument = [*argument, *argument.values()]
    if kind is tuple and SCALAR_TYPES.issuperset(map(type, argument)):
        return argument
    if isinstance(argument, (tuple, list, range)):
        return [*map(as_comparable, argument)]
    if isinstance(argument, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return str(argument)
    if isinstance(argument, np.ndarray) and argument.ndim:
        number = 0 if argument.dtype.hasobject else crc32(argument.tobytes())
        return [argument.dtype.str, *argument.shape, number]
    return as_comparable(argument.item()) if isinstance(argument, (np.generic, np.ndarray)) else kind.__name__


def described_arguments(words: Sequence[Any]) -> str:
    """Arguments as words, for messages; without ``...``, a tensor, and without keywords that are None."""
    found = []
    for word in words:
        if isinstance(word, dict):
            found += [f"{key}={value!r}" for key, value in word.items() if value is not None]
        elif word is not ...:
            found.append(repr(word))
    return f" with {', '.join(found)}" if found else ""


def checksum(words: Any, before: int = 0) -> int:
    """Checksum of words and of lists of them, continued from the checksum ``before``."""
    return crc32(marshal.dumps(words, _VERSION), before)


def sample_of(x: torch.Tensor, at: int = 0) -> bytes:
    """Bytes of some elements of a plain tensor, chosen by ``at``; local.

    About 256 elements at equal distances, the first of them number ``at``: so in as many calls as the
    distance each element was compared once.
    """
    dims, total = x.dim(), x.numel()
    if not (is_readable(x) and total):
        return b""
    if not dims or total <= _SAMPLED or x.is_contiguous():
        flat = x.detach().reshape(-1)
        stride = max(1, total // _SAMPLED)
        some = flat[at % stride :: stride]
    else:
        # ``reshape`` would copy the whole tensor.
        steps = [ceil(n / _SAMPLED ** (1 / dims)) for n in x.shape]
        some = x.detach()[tuple(slice(at % step, None, step) for step in steps)]
    # Numpy gets a clone, since torch cannot resize memory again that numpy has seen.
    return as_words((some if some.is_cpu else down(some)).clone()).tobytes()


def summary_of(x: torch.Tensor) -> tuple[str, bytes]:
    """Form and bytes of a summary of a plain tensor, for ``values_of``; local.

    Sums of floating-point numbers, which rounding changes little; of integers a checksum; of small tensors
    all elements.
    """
    if not is_readable(x) or x.numel() <= _SAMPLED:
        return str(x.dtype), sample_of(x)
    flat = x.detach().reshape(-1)
    if not (x.is_floating_point() or x.is_complex()):
        return "torch.int64", crc32(as_words(down(flat).clone()).tobytes()).to_bytes(8, sys.byteorder)
    if x.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    sums = torch.zeros(_SAMPLED, dtype=torch.float64, device=flat.device)
    # Rows have different weights, so that exchanged rows change the sums.
    weights = 1 + torch.arange(_ROWS, dtype=torch.float64, device=flat.device).unsqueeze(1) / _ROWS
    for at, part in enumerate(flat.split(_ROWS * _SAMPLED)):
        finite = part.double().nan_to_num(3.0, 5.0, -7.0)
        rows = nn.functional.pad(finite, (0, -len(part) % _SAMPLED)).view(-1, _SAMPLED)
        sums += (1 + at / _ROWS) * (weights[: len(rows)] * rows).sum(0)
    return _SUMS, down(sums).numpy().tobytes()


def values_of(form: str, data: bytes) -> list[float]:
    """The numbers in bytes from ``sample_of`` or ``summary_of``, by their form."""
    dtype = torch.float64 if form == _SUMS else _dtype(form)
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    real = torch.view_as_real(found).reshape(-1) if dtype.is_complex else found
    return (real.double() if dtype.is_floating_point else real).tolist()


def differ_beyond_rounding(dtype: str, form: str, first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether values differ by more than rounding: half of an element's digits, a sum's last few bits."""
    kind = _dtype(dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return [*first] != [*other]
    largest = max((abs(v) for v in (*first, *other) if isfinite(v)), default=0.0)
    eps = torch.finfo(kind).eps
    rounding = _SUM_TOLERANCE * eps if form == _SUMS else eps**0.5
    return not are_close(first, other, largest * rounding)


def are_close(first: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    """Whether as many numbers differ by at most ``tolerance``; equal infinities and two NaN do not differ."""
    one, two = (torch.tensor([*each], dtype=torch.float64) for each in (first, other))
    return len(one) == len(two) and torch.allclose(one, two, 0.0, tolerance, equal_nan=True)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))

"""What a rank tells functions of torch beside split tensors: numbers, words, and plain tensors.

All ranks say the same, or each of them computes something else.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from distdl_rma.ops.core.tensors import as_words, is_in_memory

# What is compared as it is.
WORDS = frozenset({int, float, bool, complex, str, type(None)})
# Of tensors, their layouts say what has to be said; the class of split ones is added.
TENSORS: set[Any] = {torch.Tensor, nn.Parameter}
# Tuples of them, as strides are, that were met before: what is equal may be told apart by its type.
_KNOWN: set[tuple[Any, ...]] = set()
_MOST_KNOWN = 1 << 12
# Without references, which depend on how often an object is used elsewhere.
_VERSION = 2
# Elements of a plain tensor.
_SAMPLED = 256
_PAIR = 2


def said_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All of some arguments that are no tensors."""
    try:
        found = [
            one if one.__class__ in WORDS or (one.__class__ is tuple and one in _KNOWN) else plainly(one)
            for one in args
            if one.__class__ not in TENSORS
        ]
    except TypeError:
        # Slices, and lists, are not hashable.
        found = [plainly(one) for one in args if one.__class__ not in TENSORS]
    if kwargs:
        found += [
            [key, one if one.__class__ in WORDS else plainly(one)]
            for key, one in kwargs.items()
            if one.__class__ not in TENSORS
        ]
    return found


def plainly(argument: Any) -> Any:
    """An argument without tensors, in words and numbers, and lists of them."""
    kind = argument.__class__
    if kind in WORDS:
        return argument
    if kind is slice:
        argument = argument.start, argument.stop, argument.step
    if isinstance(argument, Mapping):
        argument = [*argument, *argument.values()]
    if kind is tuple and all(one.__class__ in WORDS for one in argument):
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
    dims, total = x.dim(), x.numel()
    if not (is_in_memory(x) and total):
        return 0
    if not dims or total <= _SAMPLED or x.is_contiguous():
        flat = x.detach().reshape(-1)
        stride = max(1, total // _SAMPLED)
        return crc32(as_words(flat[at % stride :: stride]).tobytes())
    # All of it would be copied.
    steps = [ceil(n / _SAMPLED ** (1 / dims)) for n in x.shape]
    return crc32(as_words(x.detach()[tuple(slice(at % step, None, step) for step in steps)]).tobytes())

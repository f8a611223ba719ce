"""Copies and functions of large arrays: by one thread of numpy, or by several threads of a floor above.

One core does not fill the memory bus, so several copy a large array sooner. Numpy has no threads for that,
torch has, and this floor must not import torch. So layers bring torch's threads here when they are loaded
(``use``), and programs that use segments alone copy by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# To begin with several threads takes as long as the copy of so many bytes.
LARGE_NBYTES = 256 << 10


class Threads(Protocol):
    """Functions of arrays that several threads compute; each returns whether it did, or changed nothing."""

    def number(self) -> int:
        """Threads that work together."""

    def copy(self, target: Array, source: Array) -> bool:
        """Copy an array into another of the same shape."""

    def apply(self, function: Callable[..., Any], first: Array, second: Array | int, out: Array) -> bool:
        """Write what a function of numpy returns for two arrays, or for an array and a number, to ``out``."""


# One or none; see ``use``.
_threads: list[Threads] = []


def use(threads: Threads) -> None:
    """From now on these threads work on large arrays of this process."""
    _threads[:] = [threads]


def number_of_threads() -> int:
    """Threads that work together on a large array."""
    return _threads[0].number() if _threads else 1


# Copies an array into another of the same type, or of another byte order.
copy_small: Callable[[Array, Array], None] = partial(np.copyto, casting="equiv")


def copy(target: Array, source: Array) -> None:
    """As ``copy_small``; several threads copy a large array."""
    if target.nbytes < LARGE_NBYTES or not _threads or not _threads[0].copy(target, source):
        copy_small(target, source)


def by_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy of two operands and ``out``; several threads compute large results."""

    def of_two(first: Array, second: Array | int, out: Array) -> Array:
        if out.nbytes < LARGE_NBYTES or not _threads or not _threads[0].apply(function, first, second, out):
            function(first, second, out=out)
        return out

    return of_two

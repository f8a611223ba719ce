"""Whether facts are equal on all ranks, found by an allreduce that sums other numbers in float64 too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from distdl_rma.geometry.exchange import fingerprint

# Bits of half a code: float64 adds squares and products of halves exactly, on thousands of ranks.
_BITS = 20
# Number of elements that ``words_of`` returns.
WORDS = 4


def halves(number: int) -> tuple[int, int]:
    """The lowest 20 bits of a number, and the 20 bits above them."""
    return number % (1 << _BITS), (number >> _BITS) % (1 << _BITS)


@lru_cache
def words_of(facts: str) -> tuple[int, int, int, int]:
    """Numbers that a rank adds for its facts: the halves of a code of 40 bits, each with its square."""
    low, high = halves(fingerprint(facts))
    return low, low**2, high, high**2


def are_equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether so many ranks have added the same words.

    P numbers are equal if and only if P times the sum of their squares is the square of their sum.
    """
    low, low_squares, high, high_squares = map(int, sums)
    return low_squares * ranks == low**2 and high_squares * ranks == high**2

"""What followed from what all ranks said in a call, by numbers that are equal on all of them."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from distdl_rma.geometry.exchange import fingerprint

P = TypeVar("P")
N = TypeVar("N")
# Number of what was not said before.
UNKNOWN = 0
_KEPT_PLANS, _KEPT_STATES = 16, 32


class CallState(NamedTuple, Generic[P, N]):
    """What came of a call; digests of what the plan depends on, and of all that the ranks said."""

    plan: P
    needs: N
    key: bytes
    said: bytes
    longest: int  # bytes of the longest row


class PlanCache(Generic[P, N]):
    """Plans by what all ranks said in a call at some place, and which of them a rank may expect next.

    All ranks add the same states, and come to them in the same order, so that they number and forget them
    alike. The plans that were used last are kept, and the rest given up.
    """

    def __init__(self) -> None:
        self._counted = count(UNKNOWN + 1)
        self._states: OrderedDict[int, CallState[P, N]] = OrderedDict()
        self._plans: OrderedDict[bytes, P] = OrderedDict()
        # Numbers by what all ranks said; by what this one said; by that, and the number of the call before.
        self._numbers: dict[bytes, int] = {}
        self._by_row: dict[bytes, int] = {}
        self._by_last: dict[tuple[int, bytes], int] = {}
        self.number = UNKNOWN  # of the last call

    def __getitem__(self, number: int) -> CallState[P, N]:
        return self._states[number]

    def compared(self, row: bytes) -> tuple[int, int, int]:
        """What a rank that says ``row`` compares with the others: a number, a fingerprint, a length of rows.

        The number is that of the expected combination, whose longest row all ranks know that expect it. A row
        that is new is told by its fingerprint: all ranks may say the same.
        """
        number = self._by_last.get((self.number, row)) or self._by_row.get(row, UNKNOWN)
        return (number, 0, self._states[number].longest) if number else (number, fingerprint(row), len(row))

    def plan(self, key: bytes) -> P | None:
        """Plan for what has this digest, if there is one."""
        return self._plans.get(key)

    def number_of(self, plan: P, needs: N, key: bytes, said: bytes, longest: int) -> int:
        """Number of what all ranks said, in rows of so many bytes at most; it was said before or is new."""
        number = self._numbers.get(said)
        if number is None:
            number = self._numbers[said] = next(self._counted)
            self._plans[key], self._states[number] = plan, CallState(plan, needs, key, said, longest)
        return number

    def come_to(self, number: int, row: bytes) -> None:
        """Note that all ranks agreed on a number that is not the last one, this one saying ``row``."""
        self._by_last[self.number, row] = self._by_row[row] = self.number = number
        self._states.move_to_end(number)
        self._plans.move_to_end(self._states[number].key)
        if len(self._plans) > _KEPT_PLANS:
            # Its memory goes with the last graph that still needs it.
            key, _ = self._plans.popitem(last=False)
            self._forget({number for number, state in self._states.items() if state.key == key})
        if len(self._states) > _KEPT_STATES:
            self._forget({next(iter(self._states))})

    def _forget(self, gone: set[int]) -> None:
        for number in gone:
            del self._numbers[self._states.pop(number).said]
        self._by_row = {row: n for row, n in self._by_row.items() if n not in gone}
        self._by_last = {at: n for at, n in self._by_last.items() if not gone & {n, at[0]}}


def digest(text: bytes) -> bytes:
    """Digest that no other text has."""
    return blake2b(text, digest_size=16).digest()

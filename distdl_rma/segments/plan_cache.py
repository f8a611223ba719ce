"""Plans that follow from the facts of all ranks; each combination of facts has an id, equal on all ranks.

A layer's plan depends on the shapes of all ranks, of which a rank knows its own only. To send all shapes in
each call would cost a message to every rank. But calls repeat themselves, so a rank guesses::

    call    rank 0 has    rank 1 has      compared
    1       A             B               both rows are new     they differ, rows travel: (A, B) is 1
    2       A, expects 1  B, expects 1    1 and 1               plan 1
    3       A, expects 1  C, new          1 and new             they differ, rows travel: (A, C) is 2
    4       A, expects 2  B, expects 1    2 and 1               they differ, rows travel: (A, B) is 1
    5       A, expects 2  C, expects 2    2 and 2               plan 2
    6       A, expects 1  B, expects 1    1 and 1               plan 1

A row that came with several others is expected as it was after the same call before: in call 6, A comes
after 2 as in call 4. Equal ids prove equal combinations, since each rank names an id only for the row that it
has. If ids differ, rows travel, which takes time and is never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from distdl_rma.geometry.exchange import fingerprint

P = TypeVar("P")
N = TypeVar("N")
# Id of a combination that is new.
UNKNOWN = 0
_KEPT_PLANS, _KEPT_STATES = 16, 32


class CallState(NamedTuple, Generic[P, N]):
    """Result of one combination of the ranks' facts."""

    plan: P
    needs: N
    key: bytes  # digest of the facts that the plan depends on
    rows_digest: bytes  # digest of the rows of all ranks
    longest: int  # bytes of the longest row


class PlanCache(Generic[P, N]):
    """Plans of one place in the program, and a prediction of the next combination of facts.

    All ranks add and use the same states in the same order, so that ids and evictions are equal on all of
    them. The least recently used plans and states are evicted.

    ``add`` and ``switch_to`` are called only with what all ranks have agreed on: the id, or the rows of all.
    The predictions, ``_by_row`` and ``_by_last``, differ between ranks and need not agree.
    """

    def __init__(self) -> None:
        self._counted = count(UNKNOWN + 1)
        self._states: OrderedDict[int, CallState[P, N]] = OrderedDict()
        self._plans: OrderedDict[bytes, P] = OrderedDict()
        # Ids by the digest of all rows; by this rank's row; by the id of the previous call and this row.
        self._numbers: dict[bytes, int] = {}
        self._by_row: dict[bytes, int] = {}
        self._by_last: dict[tuple[int, bytes], int] = {}
        self.number = UNKNOWN  # of the last call

    def __getitem__(self, number: int) -> CallState[P, N]:
        return self._states[number]

    def compared(self, row: bytes) -> tuple[int, int, int]:
        """The three integers that a rank with this ``row`` compares: id, fingerprint, length of a row.

        The id is that of the expected combination; the length is that of its longest row. A row that is new
        has id 0, and is compared by its fingerprint, because all ranks may have the same.
        """
        number = self._by_last.get((self.number, row)) or self._by_row.get(row, UNKNOWN)
        return (number, 0, self._states[number].longest) if number else (number, fingerprint(row), len(row))

    def plan(self, key: bytes) -> P | None:
        """Plan for facts with this digest; None if there is none."""
        return self._plans.get(key)

    def add(self, plan: P, needs: N, key: bytes, rows_digest: bytes, longest: int) -> int:
        """Id of the combination of all ranks' rows with this digest; a new one is added with its plan."""
        number = self._numbers.get(rows_digest)
        if number is None:
            number = self._numbers[rows_digest] = next(self._counted)
            self._plans[key], self._states[number] = plan, CallState(plan, needs, key, rows_digest, longest)
        return number

    def switch_to(self, number: int, row: bytes) -> None:
        """Note that all ranks, of which this one has ``row``, agreed on another id than in the last call."""
        self._by_last[self.number, row] = self._by_row[row] = self.number = number
        self._states.move_to_end(number)
        self._plans.move_to_end(self._states[number].key)
        if len(self._plans) > _KEPT_PLANS:
            # The plan's memory is freed with the last graph that needs it.
            key, _ = self._plans.popitem(last=False)
            self._forget({number for number, state in self._states.items() if state.key == key})
        if len(self._states) > _KEPT_STATES:
            self._forget({next(iter(self._states))})

    def _forget(self, gone: set[int]) -> None:
        for number in gone:
            del self._numbers[self._states.pop(number).rows_digest]
        self._by_row = {row: n for row, n in self._by_row.items() if n not in gone}
        self._by_last = {at: n for at, n in self._by_last.items() if not gone & {n, at[0]}}


def digest(text: bytes) -> bytes:
    """Digest of 16 bytes."""
    return blake2b(text, digest_size=16).digest()

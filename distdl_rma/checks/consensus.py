"""What some ranks say to each other beside their data: whether it is alike, and in words if it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.collectives.settling import CONSENSUS
from distdl_rma.segments.manager import SegmentManager

# Bytes of each rank that travel at a time, and of all of them together.
_PASS_NBYTES, _ALL_NBYTES = 512, 1 << 20
_LEAST_NBYTES = 64
# Of a title, behind its fingerprint in so many digits.
_TITLE_NBYTES, _CODE = 192, 14


class Consensus:
    """One of each list of ranks of a machine, for all that these have to agree on; blocking, small.

    In the usual case, all being alike, that costs O(log P) messages of a few words. All texts go to all ranks
    only if they differ. What the ranks say at a time must be of one ``title``: those that are at different
    places learn it from ``MismatchError``, on all of them alike. Its memory is small, and stays
    until the machine is closed. Local to make; the first start connects, and is collective.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int]) -> None:
        self._manager, self.ranks = manager, tuple(ranks)
        self._vote = EqualityCheck(manager, ranks, "agreement")
        self.missing = self._vote.missing
        self._title, self._code = "", 0
        self._pass_nbytes = max(_LEAST_NBYTES, min(_PASS_NBYTES, _ALL_NBYTES // len(self.ranks)))
        self._passes: Allgather | None = None
        # What a timeout may have left: passes that are over, and whether it was words, or a refusal.
        self._parts: list[NDArray[np.uint8]] = []
        self._telling: tuple[bytes, int] | None = None
        self._gathering: tuple[str, bytes] | None = None
        self._said: tuple[str, tuple[int, ...]] = "", ()
        self._refusing = False

    @classmethod
    def of(cls, manager: SegmentManager, ranks: Sequence[int]) -> Consensus:
        """The one of these ranks, in this order."""
        key = CONSENSUS, tuple(ranks)
        found = manager.kept.get(key)
        if not isinstance(found, Consensus):
            found = manager.kept[key] = cls(manager, ranks)
        return found

    def connect(self) -> None:
        """Exchange addresses, once; collective, blocking."""
        self._vote.connect()

    def start(self, title: str, code: int, *words: int) -> int:
        """Say three integers of 64 bits; ``code`` is the fingerprint of the title. Does not wait.

        Returns the number of the epoch, for ``wait``; what was said is gone on with where it is said again
        after a timeout. Texts that were given up after one are waited for now.
        """
        if self._refusing and (title, words) == self._said:
            return self._vote.epoch
        if self._telling is not None:
            # Given up here; the others take it to its end.
            self.texts(*self._telling)
        self._title, self._code, self._said, self._refusing = title, code, (title, words), False
        return self._vote.start(title, code, *words)

    def wait(self, timeout: float | None = None, epoch: int | None = None) -> bool:
        """Return whether all said the same; blocking until all have started.

        ``ProtocolError`` if another epoch than that which ``start`` returned was started since then.
        """
        if not self._refusing:
            if self._vote.wait(timeout, epoch):
                return True
            self._refusing = self._vote.smallest[0] != self._vote.largest[0]
        if self._refusing:
            self._refuse()
        return False

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest of each integer that some rank said last."""
        return self._vote.largest[1:]

    @property
    def smallest(self) -> tuple[int, ...]:
        """The smallest of each integer that some rank said last."""
        return self._vote.smallest[1:]

    def gather(self, title: str, text: bytes) -> list[bytes]:
        """Texts of all ranks, in their order; blocking, collective. Digests only if all are alike.

        After a timeout the call can be repeated.
        """
        if self._gathering != (title, text):
            self._gathering = None
            self.start(title, fingerprint(title), len(text), fingerprint(text), 0)
            if self.wait():
                return [text] * len(self.ranks)
            self._gathering = title, text
        found = self.texts(text, self.largest[0])
        self._gathering = None
        return found

    def texts(self, text: bytes, longest: int) -> list[bytes]:
        """Texts of all ranks, in their order, of so many bytes at most; blocking, collective.

        After a timeout the call can be repeated.
        """
        if self._passes is None:
            self._passes = Allgather(
                self._manager, self.ranks, self._pass_nbytes, np.uint8, "agreement (words)"
            )
        size, head = len(self.ranks), len(text).to_bytes(4, "little")
        self._telling = text, longest
        count = -(-(longest + len(head)) // self._pass_nbytes)
        mine = np.frombuffer((head + text).ljust(count * self._pass_nbytes, b"\0"), np.uint8)
        for part in mine.reshape(count, self._pass_nbytes)[len(self._parts) :]:
            if not self._passes.running:
                self._passes.active[:] = part
                self._passes.start()
            self._parts.append(self._passes.wait().reshape(size, -1).copy())
        parts, self._parts, self._telling = self._parts, [], None
        rows = [row.tobytes() for row in np.concatenate(parts, axis=1)]
        return [row[4 : 4 + int.from_bytes(row[:4], "little")] for row in rows]

    def _refuse(self) -> None:
        # Those that are elsewhere come here too.
        text = f"{self._code:0{_CODE}x}{self._title}".encode()[:_TITLE_NBYTES]
        titles = self.texts(text, _TITLE_NBYTES)
        self._refusing = False
        at, other = next((at, title) for at, title in enumerate(titles) if title != titles[0])
        first, second = (repr(title[_CODE:].decode(errors="ignore")) for title in (titles[0], other))
        raise MismatchError(
            f"rank {self.ranks[0]} is in {first} but rank {self.ranks[at]} in {second}: do all ranks build"
            " and call the same things in the same order, with the same arguments?"
        )


def gather_words(
    manager: SegmentManager, words: Any, name: str, ranks: Sequence[int] | None = None
) -> dict[int, Any]:
    """What every rank says, in words that JSON can carry, by rank id in the order of ``ranks``.

    Collective over these, all of the machine if None; blocking, for set-up and for errors. ``name`` is for
    messages, alike on all ranks. Only a digest travels where all say the same.
    """
    ranks = manager.ranks if ranks is None else tuple(ranks)
    texts = Consensus.of(manager, ranks).gather(name, json.dumps(words).encode())
    # Most ranks say what others say too.
    said = {text: json.loads(text) for text in set(texts)}
    return {rank: said[text] for rank, text in zip(ranks, texts, strict=True)}

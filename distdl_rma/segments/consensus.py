"""Comparison of ranks by numbers, and by words only where the numbers differ.

``together`` gives local work of all ranks one outcome. Two steps, of which the second is rare::

    every rank:  title, 3 integers  ->  smallest and largest of each, over all ranks
                 smallest == largest: all agree, done              usual; as long as a barrier
                 else: each sends a row of bytes to all ranks      in passes of 512 bytes at most

All ranks see the same smallest and largest numbers, so all take the second step, or none: nobody has to tell.
The title is compared with the numbers. Ranks in different places of the program then exchange titles in place
of rows, and all raise the same error, in place of reading each other's rows as what they are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma import errors
from distdl_rma.errors import DataError, DistdlError, MismatchError, PeerFailedError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.error_texts import OF_SEVERAL_RANKS

# Bytes per pass: of each rank, and of all ranks together.
_PASS_NBYTES, _ALL_NBYTES = 512, 1 << 20
_LEAST_NBYTES = 64
# Bytes of a title with its fingerprint, and digits of the fingerprint, which comes first.
_TITLE_NBYTES, _CODE = 192, 14
_code = lru_cache(1 << 10)(fingerprint)


class Consensus(EqualityCheck):
    """All comparisons of one list of ranks of a machine; blocking, small.

    Ranks compare three integers at a place of the program, its ``title``. If these are equal, as usual, that
    costs O(log P) messages of a few words. Only if they differ, each rank sends a row of bytes to all ranks.
    Ranks with different titles all raise the same ``MismatchError``. The first of the four ``largest`` and
    ``smallest`` integers is that of the titles. The memory is small, and stays until the machine is closed.
    Local to construct; the first start connects, and is collective.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int]) -> None:
        super().__init__(manager, ranks, "agreement")
        self._pass_nbytes = max(_LEAST_NBYTES, min(_PASS_NBYTES, _ALL_NBYTES // len(self.ranks)))
        self._passes: Allgather | None = None
        # State after a timeout: finished passes; arguments of ``rows``; arguments of ``gather``.
        self._parts: list[NDArray[np.uint8]] = []
        self._unfinished: tuple[bytes, int] | None = None
        self._gathering: tuple[str, bytes] | None = None

    @classmethod
    def of(cls, manager: SegmentManager, ranks: Sequence[int]) -> Consensus:
        """The instance for these ranks, in this order."""
        key = Consensus, tuple(ranks)
        found = manager.shared_objects.get(key)
        if not isinstance(found, Consensus):
            found = manager.shared_objects[key] = cls(manager, ranks)
        return found

    def start(self, title: str, *words: int) -> int:
        """Send three integers of 64 bits at the place ``title``; does not wait for other ranks.

        Returns the epoch, for ``wait``, which returns whether all ranks sent the same. A start that is
        repeated after a timeout continues its epoch. An exchange of rows that a timeout interrupted is
        finished first, which blocks.
        """
        sent = _code(title), *words
        if self._unfinished is not None and not (
            self._repeatable and (title, sent) == (self._for, self._values)
        ):
            # This rank gave the exchange up; the other ranks finish it.
            self.rows(*self._unfinished)
        return super().start(title, *sent)

    def alike(self, title: str, *words: int, timeout: float | None = None) -> bool:
        """Whether all ranks send the same three integers; blocking until all have sent theirs."""
        return self.wait(timeout, self.start(title, *words))

    def gather(self, title: str, row: bytes) -> list[bytes]:
        """Rows of all ranks, in their order; blocking, collective. After a timeout the call can be repeated.

        Equal rows do not travel, only digests.
        """
        if self._gathering != (title, row):
            self._gathering = None
            if self.alike(title, len(row), fingerprint(row), 0):
                return [row] * len(self.ranks)
            self._gathering = title, row
        found = self.rows(row, self.largest[1])
        self._gathering = None
        return found

    def rows(self, row: bytes, longest: int) -> list[bytes]:
        """As ``gather``, but without a comparison first; rows have at most ``longest`` bytes."""
        if self._passes is None:
            self._passes = Allgather(
                self._manager, self.ranks, self._pass_nbytes, np.uint8, "agreement (words)"
            )
        size, head = len(self.ranks), len(row).to_bytes(4, "little")
        self._unfinished = row, longest
        count = -(-(longest + len(head)) // self._pass_nbytes)
        mine = np.frombuffer((head + row).ljust(count * self._pass_nbytes, b"\0"), np.uint8)
        for part in mine.reshape(count, self._pass_nbytes)[len(self._parts) :]:
            if not self._passes.running:
                self._passes.active[:] = part
                self._passes.start()
            self._parts.append(self._passes.wait().reshape(size, -1).copy())
        parts, self._parts, self._unfinished = self._parts, [], None
        found = [each.tobytes() for each in np.concatenate(parts, axis=1)]
        return [each[4 : 4 + int.from_bytes(each[:4], "little")] for each in found]

    def _explain(self) -> None:
        (least, *_), (most, *_) = self.smallest, self.largest
        if least == most:
            return
        # Ranks with another title run this too.
        text = f"{self._values[0]:0{_CODE}x}{self._for}".encode()[:_TITLE_NBYTES]
        titles = self.rows(text, _TITLE_NBYTES)
        self._waited, self._repeatable = self.epoch, False
        at, other = next((at, title) for at, title in enumerate(titles) if title != titles[0])
        first, second = (repr(title[_CODE:].decode(errors="ignore")) for title in (titles[0], other))
        raise MismatchError(
            f"rank {self.ranks[0]} is in {first} but rank {self.ranks[at]} in {second}: do all ranks build"
            " and call the same things in the same order, with the same arguments?"
        )


def gather_words(
    manager: SegmentManager, words: Any, name: str, ranks: Sequence[int] | None = None
) -> dict[int, Any]:
    """Words of every rank, in JSON's types, by rank id in the order of ``ranks``.

    Collective over ``ranks``, all of the machine if None; blocking, for set-up and for errors. ``name`` is
    for messages, and equal on all ranks. If all words are equal, only a digest travels.

    JSON, and not pickle: words are compared as text, and equal objects may have different pickles. Tuples
    come back as lists, and keys of dicts as text, on all ranks alike.
    """
    ranks = manager.ranks if ranks is None else tuple(ranks)
    texts = Consensus.of(manager, ranks).gather(name, json.dumps(words).encode())
    decoded = {text: json.loads(text) for text in set(texts)}
    return {rank: decoded[text] for rank, text in zip(ranks, texts, strict=True)}


@contextmanager
def together(
    machine: Machine,
    ranks: Sequence[int],
    title: str,
    *,
    failed: type[DistdlError] = DataError,
    differs: type[DistdlError] = MismatchError,
    advice: str = "do all ranks pass the same?",
) -> Iterator[dict[str, Any]]:
    """Local work of each rank, which succeeds on all ranks or raises on all; its end is collective, blocking.

    If the work of some rank raises, this rank raises its own error, and the others one of the same type that
    names it; ``failed`` if it is not of the library. The context gets a dict for facts of this rank, by name,
    in JSON's types. If ranks state another value of a fact, all raise ``differs`` with both, and ``advice``.
    All ranks pass the same ``ranks`` and ``title``, which says what they do here.

    ::

        with together(machine, machine.ranks, "load", advice="give all ranks the same file") as facts:
            data = read(path)               # rank 1: FileNotFoundError
            facts["shape"] = data.shape     # or: another shape on rank 1
        # after the block all ranks have the file, with the same shape, or all have raised

    The work itself must not wait for other ranks, since one that raises does not come.
    """
    facts: dict[str, Any] = {}
    error: Exception | None = None
    try:
        yield facts
    except Exception as found:  # noqa: BLE001 - raised on all ranks
        error = found
    problem = None if error is None else (type(error).__name__, str(error))
    try:
        answers = gather_words(machine.segments, [problem, facts], title, ranks)
    except OF_SEVERAL_RANKS as failure:
        machine.settle(failure, ranks)
        raise
    if isinstance(error, DistdlError):
        raise error
    if error is not None:
        raise failed(f"{title}: rank {machine.rank}: {type(error).__name__}: {error}") from error
    for rank, (its, _) in answers.items():
        if its:
            kind, text = its
            known = kind in errors.__all__ and kind != PeerFailedError.__name__
            # The error may begin with the title already.
            text = text.removeprefix(f"{title}: ") if known else f"{kind}: {text}"
            raise (getattr(errors, kind) if known else failed)(f"{title}: rank {rank}: {text}")
    first: dict[str, tuple[int, Any]] = {}
    for rank, (_, stated) in answers.items():
        for name, value in stated.items():
            one, its = first.setdefault(name, (rank, value))
            if its != value:
                raise differs(f"{title}: {name}: {its} on rank {one}, but {value} on rank {rank}; {advice}")

"""What ranks have to say of each other's input, so that an error reads the same everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from distdl_rma.errors import ShapeError
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.all_push import AllPush

_NBYTES = 512
_PROBLEM, _FACTS = "!", "="


class ErrorExchange:
    """Short texts of all ranks to all ranks, once all of them know that something does not fit.

    Nothing is allocated before the first time.

    Parameters
    ----------
    machine
        The machine.
    ranks
        Rank ids that take part, this one included.
    name
        Name of the layer.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int], name: str) -> None:
        self._machine, self._ranks, self._name = machine, tuple(ranks), name
        self._round: AllPush | None = None

    def refuse(self, problem: str, facts: str) -> ShapeError:
        """Error to raise, the same on all ranks; blocking until all of them have called.

        Parameters
        ----------
        problem
            What is wrong on this rank, empty if nothing is.
        facts
            What this rank passes, which is to be alike on all ranks.
        """
        texts = self._exchange(_PROBLEM + problem if problem else _FACTS + facts)
        problems = {rank: text[1:] for rank, text in texts.items() if text.startswith(_PROBLEM)}
        if problems:
            rank, text = next(iter(problems.items()))
            others = f" ({len(problems)} ranks of {len(texts)} complain)" if len(problems) > 1 else ""
            return ShapeError(f"{self._name!r}: rank {rank}: {text}{others}")
        first, expected = next(iter(texts.items()))
        for rank, text in texts.items():
            if text != expected:
                return ShapeError(
                    f"{self._name!r}: rank {first} passes {expected[1:]} but rank {rank} {text[1:]}"
                )
        return ShapeError(f"{self._name!r}: the ranks' inputs do not fit together; each passes {facts}")

    def _exchange(self, text: str) -> dict[int, str]:
        if self._round is None:
            title = f"{self._name} (complaints)"
            self._round = AllPush(self._machine.segments, self._ranks, _NBYTES, np.uint8, title)
            weakref.finalize(self, self._round.close)
        row = np.zeros(_NBYTES, np.uint8)
        words = " ".join(text.split()).encode()[:_NBYTES]
        row[: len(words)] = np.frombuffer(words, np.uint8)
        self._round.start(row)
        rows = self._round.wait()
        return {
            rank: rows[at].tobytes().rstrip(b"\0").decode(errors="ignore")
            for at, rank in enumerate(self._ranks)
        }

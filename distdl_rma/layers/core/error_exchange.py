"""Rows of all ranks of a layer to all, and texts in them, so that an error reads the same everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ShapeError
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.all_push import AllPush

_NBYTES = 512
_PROBLEM, _FACTS = "!", "="


def rows_of_all(
    owner: object, machine: Machine, ranks: Sequence[int], count: int, dtype: npt.DTypeLike, title: str
) -> AllPush:
    """A row from every rank to every rank, whose memory goes with its owner: all by which ranks agree."""
    rows = AllPush(machine.segments, ranks, count, dtype, title)
    weakref.finalize(owner, rows.close)
    return rows


def text_row(text: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Row with a text, cut if it does not fit."""
    row = np.zeros(nbytes, np.uint8)
    words = text.encode()[:nbytes]
    row[: len(words)] = np.frombuffer(words, np.uint8)
    return row


def row_text(row: npt.NDArray[np.uint8]) -> str:
    """Text of a row; empty if there is none."""
    return row.tobytes().rstrip(b"\0").decode(errors="ignore")


class ErrorExchange:
    """Short texts of all ranks of a layer to all, once all of them know that something does not fit.

    Nothing is allocated before the first time.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int], name: str) -> None:
        self._machine, self._ranks, self._name = machine, tuple(ranks), name
        self._rows: AllPush | None = None

    def refuse(self, problem: str, facts: str) -> ShapeError:
        """Error to raise, the same on all ranks; blocking until all of them have called.

        Parameters
        ----------
        problem
            What is wrong on this rank, empty if nothing is.
        facts
            What this rank passes, which is to be alike on all ranks.
        """
        if self._rows is None:
            title = f"{self._name} (complaints)"
            self._rows = rows_of_all(self, self._machine, self._ranks, _NBYTES, np.uint8, title)
        said = _PROBLEM + problem if problem else _FACTS + facts
        self._rows.start(text_row(" ".join(said.split()), _NBYTES))
        texts = dict(zip(self._ranks, map(row_text, self._rows.wait()), strict=True))
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

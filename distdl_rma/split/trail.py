"""Which functions of split tensors a rank called, one after the other: ranks compare their ways."""

from __future__ import annotations

import sys
import zlib
from functools import cache
from itertools import islice
from pathlib import PurePath
from types import CodeType
from typing import Any, NamedTuple

import torch.overrides

from distdl_rma.split.table import name_of

# Torch's functions of functions come by here.
_RELAY = vars(torch.overrides)
# What asks rather than computes, which one rank may do alone.
_ASKING = frozenset({"query", "value", "gradient"})


class Step(NamedTuple):
    """A call of a function: by the module that it is in, and its place in the code that calls it."""

    function: Any
    path: str
    code: CodeType
    at: int  # in the bytecode

    @property
    def word(self) -> int:
        """A number, alike on ranks that run the same program."""
        return _word(self.function, self.path, self.code.co_firstlineno, self.at)

    @property
    def described(self) -> str:
        """For messages."""
        line, *_ = next(islice(self.code.co_positions(), self.at // 2, None), (None,))
        file = PurePath(self.code.co_filename)
        at = "" if "torch" in file.parts else f" at {file.name}:{line or self.code.co_firstlineno}"
        return name_of(self.function) + (f" in module {self.path!r}" if self.path else "") + at


@cache
def _word(function: Any, path: str, line: int, at: int) -> int:
    return zlib.crc32(f"{name_of(function)} {path} {line} {at}".encode())


# Where calls are noted, the last one counts; None while a rule calls functions itself.
TRAILS: list[list[Step] | None] = []


def note(function: Any, kind: str, path: str) -> None:
    """Note a call of a function of some kind, two frames above this one, if anyone wants to know."""
    trail = TRAILS[-1]
    if trail is None or kind in _ASKING:
        return
    frame: Any = sys._getframe(2)
    if frame.f_globals is _RELAY:
        frame = frame.f_back.f_back
    trail.append(Step(function, path, frame.f_code, frame.f_lasti))

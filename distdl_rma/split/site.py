"""Where in the user's program functions are called: names for messages, what is kept, the way of a rank."""

from __future__ import annotations

import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import islice
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch.overrides

from distdl_rma.machine import Machine
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.split.table import name_of

T = TypeVar("T")
# Kinds of inputs that a site keeps operations for.
_KEPT = 16
# Torch's functions of functions come by here.
_RELAY = vars(torch.overrides)
# What asks rather than computes, which one rank may do alone.
_ASKING = frozenset({"query", "value", "gradient"})
_OURS, _OUTSIDE = ("torch.", "distdl_rma."), ("torch", "contextlib")


class _Inner(dict[str, bool]):
    # Whether the code of a module is torch's or of this package, for each that was met.
    def __missing__(self, module: str) -> bool:
        found = self[module] = module.startswith(_OURS) or module in _OUTSIDE
        return found


_INNER = _Inner()
_THREAD = threading.local()


class Site:
    """A call of a function in the program: by the module that it is in, and the place in its code.

    It keeps what was worked out for inputs of one kind, and the segment memory that belongs to it. Its name
    is alike on all ranks that run the same program; ranks that took different ways wait at different sites,
    and the error names both.
    """

    def __init__(self, machine: Machine, path: str, function: Any, frame: FrameType | None) -> None:
        self.machine, self.path, self.function, self.where = machine, path, name_of(function), where(frame)
        short = self.function.rpartition(".")[2]
        # Two places never have one name: ranks that first meet at different ones would exchange data.
        self.name = f"{path} {short} ({self.where}:{_column(frame)})".strip()
        # Operands that went to other layouts by a rule.
        self.moved: set[str] = set()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def call_site(self) -> CallSite:
        """Where an operation is called."""
        return CallSite(self.machine, self.name)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for inputs of this kind, or is now."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            if len(self._kept) > _KEPT:
                # Its memory goes with the last graph that still needs it.
                self._kept.popitem(last=False)
        return found

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {self.where})"


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _INNER[frame.f_globals.get("__name__", "")]:
            return frame
        frame = frame.f_back
    return None


def where(frame: FrameType | None) -> str:
    """File and line, for messages."""
    return "" if frame is None else f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _column(frame: FrameType | None) -> int:
    # Where in its line the call ends, which no two calls do at one place; else the place in the bytecode.
    if frame is None:
        return 0
    *_, column = _position(frame.f_code, frame.f_lasti)
    return frame.f_lasti if column is None else column


def _position(code: CodeType, at: int) -> tuple[int | None, ...]:
    # Line, last line, column and last column of a place in the bytecode, as far as Python kept them.
    return next(islice(code.co_positions(), at // 2, None), (None,) * 4)


def site_of(machine: Machine, function: Any) -> Site:
    """The site of a call that is going on."""
    watch = machine.segments.watch
    if watch.has_raised:
        watch.goes_on()
    frame, path = user_frame(), module_path()
    place = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
    sites: dict[Hashable, Site] = machine.kept.setdefault("sites", {})
    key = (path, *place, function)
    found = sites.get(key)
    if found is None:
        found = sites[key] = Site(machine, path, function, frame)
    return found


def sites(machine: Machine) -> list[Site]:
    """All sites so far, in the order of their first calls."""
    return list(machine.kept.get("sites", {}).values())


def module_path() -> str:
    """Path of the module of a distributed model whose forward runs; empty outside."""
    stack = getattr(_THREAD, "stack", None)
    return stack[-1][0] if stack else ""


def may_move() -> bool:
    """Whether rules may move tensors to other layouts here."""
    stack = getattr(_THREAD, "stack", None)
    return not stack or stack[-1][1]


def enter(path: str, moves: bool = True) -> None:
    """Calls from now on are those of the module of this path; ``moves`` is whether rules may move tensors."""
    if not hasattr(_THREAD, "stack"):
        _THREAD.stack = []
    _THREAD.stack.append((path, moves))


def leave() -> None:
    """Calls from now on are those of the module that called the last one."""
    # What raises before it entered leaves too.
    if getattr(_THREAD, "stack", None):
        _THREAD.stack.pop()


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
        line, *_ = _position(self.code, self.at)
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

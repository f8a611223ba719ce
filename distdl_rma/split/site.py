"""Where in the user's program a function is called: its name for messages, and what is kept for it."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import PurePath
from types import FrameType
from typing import Any, TypeVar

from distdl_rma.machine import Machine
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.split.table import name_of

T = TypeVar("T")
# Kinds of inputs that a site keeps operations for.
_KEPT = 16
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
    _, _, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return frame.f_lasti if column is None else column


def site_of(machine: Machine, function: Any) -> Site:
    """The site of a call that is going on."""
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

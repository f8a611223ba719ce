"""Where in the user's program functions are called: names for messages, what is kept, the way of a rank."""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any, TypeVar
from weakref import WeakSet, finalize, ref

import torch

from distdl_rma.checks.arguments import TENSORS, said_in
from distdl_rma.checks.calls import CallTrace
from distdl_rma.machine import Machine
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.split.calls.table import name_of

T = TypeVar("T")
# Kinds of inputs that a site keeps operations for.
_KEPT = 16
# Kinds that are not compared between ranks: one rank may call them alone.
_ASKING = frozenset({"query", "value", "gradient"})
_NOTHING: dict[str, Any] = {}
_LIBRARY_PATHS = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"


class _Inner(dict[str, bool]):
    # Whether code of a file is torch's or of this package, for each that was met.
    def __missing__(self, file: str) -> bool:
        found = self[file] = file.startswith(_LIBRARY_PATHS) or file == contextlib.__file__
        return found


_INNER = _Inner()
RunningModule = tuple[
    str,  # its path
    bool,  # whether rules may redistribute tensors in it
    bool,  # whether DDP or FSDP, and no GradientSync, sums the gradients of plain tensors
    # If torch's own code calls the module: the user's line that called the outermost of such modules, once
    # that is known.
    "list[Place] | None",
    bool,  # whether all functions that it calls are called by torch's own code
]


class _Thread(threading.local):
    """Modules of this thread whose forward runs, the innermost last, and the line of the running function.

    ``place`` is None until somebody has asked for that line; whoever begins a call resets it.
    """

    def __init__(self) -> None:
        self.stack: list[RunningModule] = [("", True, False, None, False)]
        self.place: Place | None = None


THREAD = _Thread()


class Place:
    """Where code calls something: one object for each, until its user lets go of the code.

    That of a notebook's cell goes when the cell is run again, and with it what its calls kept.
    """

    def __init__(self, code: CodeType | None, at: int) -> None:
        self._code: Callable[[], CodeType | None] = _no_code if code is None else ref(code)
        self.at = at
        # Machines that have sites here.
        self.machines: WeakSet[Machine] = WeakSet()
        if code is not None:
            finalize(code, _forget, (id(code), at), ref(self)).atexit = False

    @property
    def code(self) -> CodeType | None:
        """The code, as long as somebody has it."""
        return self._code()

    @property
    def where(self) -> str:
        """File and line, for messages."""
        if self.code is None:
            return ""
        line, *_ = self._position
        return f"{PurePath(self.code.co_filename).name}:{line or self.code.co_firstlineno}"

    @property
    def column(self) -> int:
        """Where in its line the call ends, which no two calls do at one place; else its place in the code."""
        *_, column = self._position
        return self.at if column is None else column

    @property
    def _position(self) -> tuple[int | None, ...]:
        # Line, last line, column and last column, as far as Python kept them.
        positions = () if self.code is None else self.code.co_positions()
        return next(islice(positions, self.at // 2, None), (None,) * 4)


def _no_code() -> None:
    return None


def _forget(key: tuple[int, int], gone: Callable[[], Place | None]) -> None:
    # No rank that runs the same program calls there again, whenever it collects its garbage.
    place = gone()
    if place is None or _PLACES.get(key) is not place:
        return
    del _PLACES[key]
    for step in [step for step in [*_STEPS] if step[2] is place]:
        _STEPS.pop(step, None)
    for machine in [*place.machines]:
        kept = machine.kept.get("sites", {})
        for site in [site for site in [*kept] if site[1] is place]:
            kept.pop(site, None)


_NOWHERE = Place(None, 0)
_PLACES: dict[tuple[int, int], Place] = {}


def user_place() -> Place:
    """Where the innermost code calls that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _INNER[code.co_filename]:
            key = id(code), frame.f_lasti
            if key not in _PLACES:
                # The first of two threads counts.
                _PLACES.setdefault(key, Place(code, frame.f_lasti))
            found = THREAD.place = _PLACES[key]
            return found
        frame = frame.f_back
    return _NOWHERE


class Site:
    """A call of a function in the program: by the module that it is in, and the place in its code.

    It keeps what was worked out for inputs of one kind, and the segment memory that belongs to it. Its name
    is alike on all ranks that run the same program; ranks that took different ways wait at different sites,
    and the error names both.
    """

    def __init__(self, machine: Machine, path: str, function: Any, place: Place) -> None:
        self.machine, self.path, self.function, self.where = machine, path, name_of(function), place.where
        short = self.function.rpartition(".")[2]
        # Two places never have one name: ranks that first meet at different ones would exchange data.
        self.name = f"{path} {short} ({self.where}:{place.column})".strip()
        # Operands that went to other layouts by a rule.
        self.moved: set[str] = set()
        # By the ranks that take part.
        self._kept: dict[tuple[int, ...], OrderedDict[Hashable, Any]] = {}
        self._last: tuple[Hashable, Any] = None, None

    @property
    def call_site(self) -> CallSite:
        """Where an operation is called."""
        return CallSite(self.machine, self.name)

    def kept(self, key: Hashable, make: Callable[[], T], ranks: tuple[int, ...] = ()) -> T:
        """What was made for inputs of this kind, or is now.

        ``ranks`` are those that take part in it, where they are not all that call the function: what these
        keep is let go of by all of them together, whatever other kinds some of them have met.
        """
        # Mostly that of the call before: of the same layouts and numbers, which need no hash.
        if key == self._last[0]:
            last: T = self._last[1]
            return last
        found = self._found(key, make, ranks)
        self._last = key, found
        return found

    def _found(self, key: Hashable, make: Callable[[], T], ranks: tuple[int, ...]) -> T:
        kept = self._kept.setdefault(ranks, OrderedDict())
        found: T | None = kept.get(key)
        if found is None:
            found = kept[key] = make()
            if len(kept) > _KEPT:
                # Its memory goes with the last graph that still needs it.
                kept.popitem(last=False)
        return found

    def forget(self) -> None:
        """Let go of all that is kept; on all ranks alike."""
        self._kept.clear()
        self._last = None, None

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {self.where})"


def site_of(machine: Machine, function: Any) -> Site:
    """The site of a call that is going on."""
    watch = machine.segments.watch
    if watch.has_raised:
        watch.goes_on()
    path, place = THREAD.stack[-1][0], THREAD.place or user_place()
    known, key = machine.kept, (path, place, function)
    sites: dict[tuple[str, Place, Any], Site] = known["sites"] if "sites" in known else _first_site(machine)
    if key not in sites:
        place.machines.add(machine)
        sites.setdefault(key, Site(machine, path, function, place))
    return sites[key]


def _first_site(machine: Machine) -> dict[tuple[str, Place, Any], Site]:
    found: dict[tuple[str, Place, Any], Site] = machine.kept.setdefault("sites", {})

    def forget() -> None:
        for site in found.values():
            site.forget()

    machine.forgets.append(forget)
    return found


def sites(machine: Machine) -> list[Site]:
    """All sites so far, in the order of their first calls."""
    return list(machine.kept.get("sites", {}).values())


def module_path() -> str:
    """Path of the module of a distributed model whose forward runs; empty outside."""
    return THREAD.stack[-1][0]


def may_move() -> bool:
    """Whether rules may move tensors to other layouts here."""
    return THREAD.stack[-1][1]


def summed_elsewhere() -> bool:
    """Whether DDP or FSDP, and no ``GradientSync``, sums the gradients of plain tensors in this module."""
    return THREAD.stack[-1][2]


def pop_module(*_of_hook: object) -> None:
    """End the innermost module; a forward hook."""
    # A module that raises before it was put on the stack ends as well.
    if len(THREAD.stack) > 1:
        THREAD.stack.pop()


class Step:
    """A call of a function: by the module that it is in, and its place in the program.

    ``word`` is a number, alike on ranks that run the same program.
    """

    def __init__(self, function: Any, path: str, place: Place) -> None:
        self.function, self.path, self.place = function, path, place
        line = 0 if place.code is None else place.code.co_firstlineno
        self.word = zlib.crc32(f"{name_of(function)} {path} {line} {place.at}".encode())

    @property
    def described(self) -> str:
        """For messages."""
        at = self.place.where
        return (
            name_of(self.function)
            + (f" in module {self.path!r}" if self.path else "")
            + (f" at {at}" if at else "")
        )


# Where calls are noted, the last one counts; None while a rule calls functions itself.
CALL_TRACES: list[CallTrace | None] = []
_STEPS: dict[tuple[Any, str, Place], Step] = {}


def thread_inside() -> str:
    """Name of another thread that is on its way through a model now; empty if none is."""
    others = {trace.thread for trace in CALL_TRACES if trace is not None} - {threading.get_ident()}
    return next((each.name for each in threading.enumerate() if each.ident in others), "") if others else ""


def note(function: Any, kind: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
    """Add a call of a function to the trace of this call of a model, if its kind is compared."""
    trace = CALL_TRACES[-1]
    if trace is None or kind in _ASKING:
        return
    path, _, _, known, there = THREAD.stack[-1]
    if there and known:
        # All that lies between is torch's: a dozen frames, which take long to look at.
        place = THREAD.place = known[0]
    else:
        place = user_place()
        if there and known is not None:
            known.append(place)
    key = function, path, place
    if key not in _STEPS:
        _STEPS[key] = Step(*key)
    trace.steps += (_STEPS[key],)
    said: list[Any] | None = None
    if (kwargs or args[1:] or (args and args[0].__class__ not in TENSORS)) and kind != "registered":
        said, plain = said_in(args, kwargs)
        if plain:
            trace.note_plain(function, args, plain)
    if torch.is_grad_enabled() is not trace.graph:
        said = [*(said or ()), "in another grad mode than the model"]
    if said:
        trace.said += len(trace.steps), said

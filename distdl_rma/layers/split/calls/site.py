"""Sites: places of calls in the user's program, for messages, for kept operations and for comparing ranks.

A function of torch has no memory of its last call, but an operation on blocks should have: its plan, its
buffers in the segment and its connections to peers take long to make. So these are kept for the
*place* of the call, which is found from the frames of Python:

    module path "encoder.0", function conv2d, place (code object, position in its bytecode)
       |
       '--> Site, with the name "encoder.0 conv2d (model.py:31:18)" on all ranks
              |--- kept for (layout, dtype, ...): a Convolution
              '--- kept for another layout:       another Convolution; the oldest one is evicted

- Ranks that run the same program reach the same sites in the same order, so what a site keeps is made, used
  and evicted on all ranks in the same calls.
- A site lives as long as its code. A notebook's cell that runs again is a new code object, and the sites of
  the old one go (``_forget``), with their memory.
- Position in the bytecode, not the line: two calls in one line are two sites.
- While a model runs, the functions that are called are noted (``note``), and compared when the call ends.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, TypeVar
from weakref import WeakSet, finalize, ref

import torch

from distdl_rma.layers.checks.arguments import TENSORS, comparable_parts
from distdl_rma.layers.checks.model_calls import CallTrace
from distdl_rma.layers.checks.user_frames import LibraryFiles
from distdl_rma.layers.ops.core.autograd import RECORDINGS
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.split.calls.table import name_of
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.virtual_ranks.turns import of_each_rank

T = TypeVar("T")
# Number of kinds of inputs for which a site keeps operations.
_KEPT = 16
# Kinds that are not compared between ranks, since one rank may call them alone.
_UNCOMPARED = frozenset({"query", "value", "gradient"})
_NOTHING: dict[str, Any] = {}
# The code of split tensors and rules, but not all of this package: what it calls itself, as the state of a
# model that is gathered, is one site, even if ranks call ``gather_state_dict`` in different lines.
_INNER = LibraryFiles("split", "capture", "model/compiled.py")
RunningModule = tuple[
    str,  # its path
    bool,  # whether rules may redistribute tensors in it
    bool,  # whether DDP or FSDP, and no GradientSync, sums the gradients of plain tensors
]


class _Thread(threading.local):
    """State of a thread: modules whose forward runs, the innermost last, and the user's place of the call.

    ``place`` is None until it is needed first. Whoever begins a call resets it. So one call of the user has
    one place, however many functions its rule calls, and a call that needs no site walks no frames.
    """

    def __init__(self) -> None:
        self.stack: list[RunningModule] = [("", True, False)]
        self.place: Place | None = None


THREAD = _Thread()


class Place:
    """A place in code that calls a function; one object for each place, as long as the code object lives.

    If a notebook's cell runs again, its old places vanish, with what their calls kept. The reference to the
    code is weak for this reason; and line and column are only looked up for messages and names, since
    ``co_positions`` decodes a table.
    """

    def __init__(self, code: CodeType | None, at: int) -> None:
        self._code: Callable[[], CodeType | None] = (lambda: None) if code is None else ref(code)
        self.at = at
        self.machines: WeakSet[Machine] = WeakSet()
        if code is not None:
            finalize(code, _forget, (id(code), at), ref(self)).atexit = False

    @property
    def code(self) -> CodeType | None:
        """The code object; None after it was collected."""
        return self._code()

    @property
    def location(self) -> str:
        """File and line, for messages."""
        if self.code is None:
            return ""
        line, *_ = self._position
        return f"{PurePath(self.code.co_filename).name}:{line or self.code.co_firstlineno}"

    @property
    def column(self) -> int:
        """Column in which the call ends, unique within its line; the offset in the bytecode if unknown."""
        *_, column = self._position
        return self.at if column is None else column

    @property
    def _position(self) -> tuple[int | None, ...]:
        # Line, last line, column and last column; None for what Python did not keep.
        positions = () if self.code is None else self.code.co_positions()
        return next(islice(positions, self.at // 2, None), (None,) * 4)


def _forget(key: tuple[int, int], gone: Callable[[], Place | None]) -> None:
    # Ranks may collect garbage at different times: no rank that runs the same program calls there again.
    place = gone()
    if place is None or _PLACES.get(key) is not place:
        return
    del _PLACES[key]
    for machine in [*place.machines]:
        kept = machine.kept.get("sites", {})
        for site in [site for site in [*kept] if site[1] is place]:
            kept.pop(site, None)


# Of calls whose place is unknown, or the same on all ranks wherever their programs are.
NO_PLACE = Place(None, 0)
_PLACES: dict[tuple[int, int], Place] = {}


def user_place() -> Place:
    """Place of the innermost call outside of torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _INNER[code.co_filename]:
            key = id(code), frame.f_lasti
            if key not in _PLACES:
                # If two threads come here at once, the first one's object counts.
                _PLACES.setdefault(key, Place(code, frame.f_lasti))
            found = THREAD.place = _PLACES[key]
            return found
        frame = frame.f_back
    return NO_PLACE


class Site:
    """A place at which the program calls a function: module path, function, and position in the code.

    It keeps operations for each kind of inputs, and so their segment memory. Its name is equal on all ranks
    that run the same program. Ranks on different code paths wait at different sites; the error names both.

    Invariant: all ranks that take part in a kept value call ``kept`` with equal keys in the same order. So
    they make it, evict it and forget it at the same time, and no message about any of this is needed.
    """

    def __init__(self, machine: Machine, path: str, function: Any, place: Place) -> None:
        self.machine, self.path, self.location = machine, path, place.location
        self.function = name_of(function)
        short = self.function.rpartition(".")[2]
        # Names must differ between places: ranks that met at two sites of one name would exchange data.
        self.name = f"{path} {short} ({self.location}:{place.column})".strip()
        # Operands that a rule redistributed.
        self.moved: set[str] = set()
        # Keyed by the ranks that take part.
        self._kept: dict[tuple[int, ...], OrderedDict[Hashable, Any]] = {}

    @property
    def call_site(self) -> CallSite:
        """For operations: the machine, and the site's name."""
        return CallSite(self.machine, self.name)

    def kept(self, key: Hashable, make: Callable[[], T], ranks: tuple[int, ...] = ()) -> T:
        """The value kept for this key, made on the first call.

        ``ranks`` are those that take part in it, if these are not all ranks that call the function. Values
        are evicted separately for each set of ranks, so that all of these evict at the same time, even if
        some of them have met other keys. The oldest one goes: uses are not recorded.
        """
        kept = self._kept.setdefault(ranks, OrderedDict())
        found: T | None = kept.get(key)
        if found is None:
            with RECORDINGS[-1].paused() if RECORDINGS else nullcontext():
                found = kept[key] = make()
            if len(kept) > _KEPT:
                # A graph that still needs the operation keeps its memory.
                kept.popitem(last=False)
        return found

    def forget(self) -> None:
        """Drop all that is kept; on all ranks in the same call."""
        self._kept.clear()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {self.location})"


def site_of(machine: Machine, function: Any) -> Site:
    """The site of the current call.

    A rank that has caught an error of an earlier call, and goes on, ends its announcement of it here.
    """
    watch = machine.segments.watch
    if watch.has_raised:
        watch.resume()
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


def module_path() -> str:
    """Path of the distributed model's module whose forward runs; empty outside of forwards."""
    return THREAD.stack[-1][0]


def may_move() -> bool:
    """Whether rules may redistribute tensors in the running module."""
    return THREAD.stack[-1][1]


def summed_elsewhere() -> bool:
    """Whether DDP or FSDP sums gradients of plain tensors in the running module, and no ``GradientSync``."""
    return THREAD.stack[-1][2]


def pop_module(*_of_hook: object) -> None:
    """Forward hook that ends the innermost module."""
    # Also runs for a module that raised before it was put on the stack.
    if len(THREAD.stack) > 1:
        THREAD.stack.pop()


class Step:
    """A noted call of a function: function, module path, and place.

    ``word`` is its hash, equal on ranks that run the same program. It has the first line of the code and not
    its file: ranks may have the program at different paths.
    """

    def __init__(self, function: Any, path: str, place: Place) -> None:
        self.function, self.path, self.place = function, path, place
        line = 0 if place.code is None else place.code.co_firstlineno
        self.word = zlib.crc32(f"{name_of(function)} {path} {line} {place.at}".encode())

    @property
    def described(self) -> str:
        """Text for messages."""
        at = self.place.location
        return (
            name_of(self.function)
            + (f" in module {self.path!r}" if self.path else "")
            + (f" at {at}" if at else "")
        )


# The last one notes calls; None while a rule calls functions itself.
CALL_TRACES: list[CallTrace | None] = of_each_rank()


def thread_inside() -> str:
    """Name of another thread that is in a call of a model now; empty if there is none."""
    others = {trace.thread for trace in CALL_TRACES if trace is not None} - {threading.get_ident()}
    return next((each.name for each in threading.enumerate() if each.ident in others), "") if others else ""


def note(function: Any, kind: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
    """Add a call of a function to the trace of the current call of a model, if its kind is compared."""
    trace = CALL_TRACES[-1]
    if trace is None or kind in _UNCOMPARED:
        return
    trace.steps.append(Step(function, THREAD.stack[-1][0], user_place()))
    said: list[Any] | None = None
    if (kwargs or args[1:] or (args and args[0].__class__ not in TENSORS)) and kind != "registered":
        said, plain = comparable_parts(args, kwargs)
        if plain:
            trace.note_plain(function, args, plain)
    if torch.is_grad_enabled() is not trace.graph:
        said = [*(said or ()), "in another grad mode than the model"]
    if said:
        trace.arguments += len(trace.steps), said

"""What a rank does and what travels meanwhile: in numbers, recorded, and as one trace of all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from distdl_rma.errors import ProtocolError

T = TypeVar("T")
_DOING = 1  # the track of what a rank does; what travels has tracks of its own


@dataclass
class Counters:
    """What this rank moved and waited since the machine started; only grows.

    ``collectives`` are calls of MPI's collectives between nodes, with the bytes handed to them.
    ``notifications`` are those of buffers; ``flushes`` are waits of MPI for all that is under way to a
    peer on another node, of which one serves many puts and notifications. A wait that ends while it still
    spins on a notification, or a flag of a small collective, is not counted.
    """

    puts: int = 0
    bytes_put: int = 0
    gets: int = 0
    bytes_got: int = 0
    collectives: int = 0
    bytes_collective: int = 0
    notifications: int = 0
    flushes: int = 0
    waits: int = 0
    seconds_waited: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something that a rank did, or that was under way for it, from ``begin`` to ``end``.

    Attributes
    ----------
    kind
        Of what a rank does: ``"start"``, ``"local"``, ``"wait"``, ``"remote"``, ``"fuse"`` as the document
        has them, ``"scale"`` in norms, ``"agree"`` on shapes. Of what travels: ``"exchange"``, or the kind
        of collective, as ``"allreduce"``.
    name
        Of the layer, movement or collective.
    begin, end
        Seconds since the recording began. What travels ends when this rank notices that it is there.
    backward
        Whether it belongs to the backward of its layer, as far as that is known.
    travels
        Whether it was under way while the rank did something else.
    """

    kind: str
    name: str
    begin: float
    end: float
    backward: bool = False
    travels: bool = False


@dataclass
class Recording:
    """Events of one rank, in the order in which they ended; complete when the recording is over.

    ``zero`` is the reading of ``time.perf_counter()`` that counts as second 0.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    zero: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self.zero


class Tracer:
    """Records what a rank does while somebody asks for it, and costs next to nothing otherwise.

    Spans belong to the rank's own thread. What travels may arrive in any thread that polls it.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        # By number, since two threads may notice the same arrival: whoever takes it out records it.
        self._under_way: dict[int, tuple[Recording, str, str, float]] = {}
        self._numbers = count()

    def begin(self, rank: int) -> Recording:
        """Begin to record; local. ``ProtocolError`` if a recording is under way."""
        if self.recording is not None:
            raise ProtocolError("a recording of this machine is under way; end it before the next begins")
        self.recording = Recording(rank)
        return self.recording

    def end(self) -> None:
        """End the recording; what still travels ends with it. Idempotent."""
        self.recording = None
        for number in tuple(self._under_way):
            self._arrive(number)

    def span(self, kind: str, name: str, backward: bool = False) -> AbstractContextManager[object]:
        """Context of an action of this rank."""
        recording = self.recording
        return _NOTHING if recording is None else _Span(recording, kind, name, backward)

    def marks(self, name: str, backward: bool = False) -> Callable[[str], object]:
        """Function that a layer calls with the kind of each action that it begins, at last with ``""``."""
        recording = self.recording
        return _unmarked if recording is None else _Marks(recording, name, backward)

    def awaited(self, items: Iterator[T], name: str, backward: bool = False) -> Iterator[T]:
        """The same items, with a ``wait`` for each time that the next one is asked for."""
        return items if self.recording is None else self._awaited(items, name, backward)

    def _awaited(self, items: Iterator[T], name: str, backward: bool) -> Iterator[T]:
        while True:
            with self.span("wait", name, backward):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def depart(self, kind: str, name: str) -> Callable[[], None]:
        """Note that a message travels from now on; return a function to call when it has arrived.

        Call it in any thread, as often as wanted: the first call counts.
        """
        recording = self.recording
        if recording is None:
            return lambda: None
        number = next(self._numbers)
        self._under_way[number] = recording, kind, name, recording.now
        return lambda: self._arrive(number)

    def watched(self, kind: str, name: str, poll: Callable[[], bool]) -> Callable[[], bool]:
        """``poll``, for a message that travels from now on, and has arrived when a call returns True."""
        arrive = self.depart(kind, name)

        def watching() -> bool:
            arrived = poll()
            if arrived:
                arrive()
            return arrived

        return watching

    def _arrive(self, number: int) -> None:
        taken = self._under_way.pop(number, None)
        if taken is not None:
            recording, kind, name, begin = taken
            recording.events.append(Event(kind, name, begin, recording.now, travels=True))


_NOTHING = nullcontext()


# Built in, since an operation calls it a handful of times: it never does anything.
_unmarked: Callable[[str], object] = dict[str, object]().get


class _Marks:
    """Each call ends one span and begins the next."""

    def __init__(self, recording: Recording, name: str, backward: bool) -> None:
        self._recording, self._name, self._backward = recording, name, backward
        self._kind, self._begin = "", 0.0

    def __call__(self, kind: str) -> None:
        now = self._recording.now
        if self._kind:
            event = Event(self._kind, self._name, self._begin, now, self._backward)
            self._recording.events.append(event)
        self._kind, self._begin = kind, now


@dataclass(slots=True)
class _Span:
    recording: Recording
    kind: str
    name: str
    backward: bool
    begin: float = 0.0

    def __enter__(self) -> None:
        self.begin = self.recording.now

    def __exit__(self, *_error: object) -> None:
        event = Event(self.kind, self.name, self.begin, self.recording.now, self.backward)
        self.recording.events.append(event)


def chrome_trace(recordings: Iterable[Recording]) -> str:
    """Recordings of several ranks as JSON in Chrome's trace format, for ``ui.perfetto.dev``.

    One process per rank; in it one track for what the rank does, and others for what travels.
    """
    numbers = count(1)
    rows: list[dict[str, Any]] = []
    for recording in sorted(recordings, key=lambda recording: recording.rank):
        here = {"pid": recording.rank}
        rows.append(here | {"ph": "M", "name": "process_name", "args": {"name": f"rank {recording.rank}"}})
        rows.append(here | {"ph": "M", "name": "process_sort_index", "args": {"sort_index": recording.rank}})
        rows.append(here | {"ph": "M", "name": "thread_name", "tid": _DOING, "args": {"name": "does"}})
        for event in sorted(recording.events, key=lambda event: (event.begin, -event.end)):
            rows += (here | row for row in _rows(event, numbers))
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def _rows(event: Event, numbers: Iterator[int]) -> list[dict[str, Any]]:
    begin, end = 1e6 * event.begin, 1e6 * event.end  # the format counts microseconds
    what = {"name": f"{event.kind} {event.name}", "cat": event.kind, "tid": _DOING}
    if event.travels:
        what["id"] = next(numbers)
        return [what | {"ph": "b", "ts": begin}, what | {"ph": "e", "ts": end}]
    return [what | {"ph": "X", "ts": begin, "dur": end - begin, "args": {"backward": event.backward}}]

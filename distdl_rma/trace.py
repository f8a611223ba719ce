"""What a rank does, and what travels meanwhile: counters, recordings and their trace; text in columns.

Two kinds of events on the time line of a rank::

    actions     |start|  local           |wait|remote|     one after another, of the rank's own thread
    messages       |---------- exchange -----|             beside them, until any thread sees the arrival

Overlap is what both show together: how much of a message lies beside computation, and how long the wait for
it is. Counters are always on, since they cost an addition; recordings only within ``machine.record()``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from distdl_rma.errors import ProtocolError

_DOING = 1  # track of the rank's own actions; messages have other tracks


@dataclass
class Counters:
    """What this rank moved and waited for since the machine started; counters only grow.

    ``collectives`` are calls of MPI's collectives between nodes, ``bytes_collective`` the bytes passed to
    them. ``notifications`` are those of buffers. ``flushes`` are MPI's waits for all messages to a peer on
    another node; one serves many puts and notifications. A wait that ends while it still spins on a
    notification, or on a flag of a small collective, is not counted.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> inbox, peer = machine.segments.get_segment_buffer(64), 1 - machine.rank
    >>> inbox.exchange([peer], label="inbox")[peer].put(np.zeros(8))
    >>> counters = machine.segments.counters
    >>> counters.puts, counters.bytes_put
    (1, 64)
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
    """An action of a rank, or a message of it under way, from ``begin`` to ``end``.

    Attributes
    ----------
    kind
        Of actions: ``"start"``, ``"local"``, ``"wait"``, ``"remote"``, ``"fuse"`` as in the document,
        ``"scale"`` in norms, ``"agree"`` on shapes. Of messages: ``"exchange"``, or the collective's kind.
    name
        Of the layer, movement or collective.
    begin, end
        Seconds since the recording began. A message ends when this rank notices its arrival.
    backward
        Whether it belongs to the backward of its layer, if that is known.
    travels
        Whether it is a message, under way while the rank did something else.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> group = machine.group()
    >>> with machine.record() as recording:
    ...     total = group.allreduce(3)
    ...     total.start()
    ...     result = total.wait()
    >>> event = recording.events[-1]
    >>> event.kind, event.name, event.travels, event.end > event.begin
    ('wait', 'allreduce', False, True)
    """

    kind: str
    name: str
    begin: float
    end: float
    backward: bool = False
    travels: bool = False


@dataclass
class Recording:
    """Events of one rank, in the order of their ends; complete when the recording is over.

    ``zero`` is the value of ``time.perf_counter()`` at second 0.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> group = machine.group()
    >>> with machine.record() as recording:
    ...     total = group.allreduce(3)
    ...     total.start()
    ...     result = total.wait()
    >>> [event.kind for event in recording.events]
    ['start', 'allreduce', 'wait']
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    zero: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self.zero


class Tracer:
    """Records the actions and messages of a rank; costs next to nothing while no recording is under way.

    Actions belong to the thread that runs the rank's program. Any thread that polls may notice an arrival.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        # Messages by number. Two threads may notice the same arrival: the one that removes it records it.
        self._under_way: dict[int, tuple[Recording, str, str, float]] = {}
        self._numbers = count()

    def begin(self, rank: int) -> Recording:
        """Begin a recording; local. ``ProtocolError`` if one is under way."""
        if self.recording is not None:
            raise ProtocolError("a recording of this machine is under way; end it before the next begins")
        self.recording = Recording(rank)
        return self.recording

    def end(self) -> None:
        """End the recording, also for messages that still travel. Idempotent."""
        self.recording = None
        for number in tuple(self._under_way):
            self._arrive(number)

    def span(self, kind: str, name: str, backward: bool = False) -> AbstractContextManager[object]:
        """Context that records an action of this rank."""
        recording = self.recording
        return _NOTHING if recording is None else _span(recording, kind, name, backward)

    def marks(self, name: str, backward: bool = False) -> Callable[[str], object]:
        """Function to call with the kind of each action that begins, and with ``""`` at the end."""
        recording = self.recording
        return _unmarked if recording is None else _Marks(recording, name, backward)

    def depart(self, kind: str, name: str) -> Callable[[], None]:
        """Record a message that travels from now on; return a function to call at its arrival.

        Any thread may call it, repeatedly: only the first call counts.
        """
        recording = self.recording
        if recording is None:
            return lambda: None
        number = next(self._numbers)
        self._under_way[number] = recording, kind, name, recording.now
        return lambda: self._arrive(number)

    def watched(self, kind: str, name: str, poll: Callable[[], bool]) -> Callable[[], bool]:
        """``poll`` for a message that travels from now on; it has arrived when a call returns True."""
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


# A built-in function that does nothing, since an operation calls it several times.
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


@contextmanager
def _span(recording: Recording, kind: str, name: str, backward: bool) -> Iterator[None]:
    begin = recording.now
    try:
        yield
    finally:
        recording.events.append(Event(kind, name, begin, recording.now, backward))


def chrome_trace(recordings: Iterable[Recording]) -> str:
    """Recordings of several ranks as JSON in Chrome's trace format, for ``ui.perfetto.dev``.

    Each rank is a process, with one track for its actions and others for its messages.

    Examples
    --------
    >>> text = chrome_trace([Recording(0, [Event("local", "conv", 0.0, 0.5)])])  # of each rank
    >>> text[:15]  # a file of it opens in ui.perfetto.dev
    '{"traceEvents":'
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


def size_text(nbytes: float) -> str:
    """A number of bytes in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} bytes"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text of rows of cells, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

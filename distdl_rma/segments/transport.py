"""Ways to a peer's segment: direct load and store on a node, MPI RMA elsewhere."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

__all__ = ["Bytes", "Link", "RemoteLink", "SharedLink", "fence_for"]

Bytes = npt.NDArray[np.uint8]

# These processors never let a store overtake an earlier store, nor a load an earlier load.
_TOTAL_STORE_ORDER = {"x86_64", "amd64", "AMD64", "i686"}


def fence_for(window: MPI.Win) -> Callable[[], None]:
    """Memory barrier between data and the flag that announces it, the only one of the library."""
    if platform.machine() in _TOTAL_STORE_ORDER:
        return lambda: None
    return window.Sync


class Link(Protocol):
    """Way to the segment of one peer; all offsets are bytes from the start of that segment."""

    @property
    def memory(self) -> Bytes | None:
        """The peer's segment itself where it can be loaded and stored directly, else None."""

    def put(self, offset: int, data: Bytes, *, stable: bool = False) -> None:
        """Begin to copy bytes into the peer's segment.

        With ``stable`` the caller promises not to change ``data`` until the notification that follows has
        been answered; otherwise a copy is taken where one is needed.
        """

    def notify(self, word: int, value: int, *, ordered: bool = True) -> None:
        """Set a notification word of the peer, after all earlier puts arrived there if ``ordered``."""

    def advance(self) -> bool:
        """Advance what is pending; return whether nothing is left."""


class SharedLink:
    """Peer on the same node: a copy into its memory, a barrier, a store to the flag."""

    def __init__(self, memory: Bytes, fence: Callable[[], None]) -> None:
        self._memory = memory
        self._bytes = memory.data
        self._words = self._bytes.cast("q")
        self._fence = fence

    @property
    def memory(self) -> Bytes | None:
        """The peer's segment."""
        return self._memory

    def put(self, offset: int, data: Bytes, *, stable: bool = False) -> None:
        """Copy bytes into the peer's segment; complete on return."""
        self._bytes[offset : offset + data.nbytes] = data.data

    def notify(self, word: int, value: int, *, ordered: bool = True) -> None:
        """Set a notification word of the peer."""
        self._fence()
        self._words[word] = value

    def advance(self) -> bool:
        """Nothing is ever pending."""
        return True


@dataclass
class _Delivery:
    # What remains of a put or a notification: requests in flight, then the notification, if any.
    requests: list[MPI.Request] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    notice: tuple[int, int] | None = None


class RemoteLink:
    """Peer on another node: request-based puts, a flush, then an atomic notification.

    Nothing here blocks for the length of a transfer: ``notify`` leaves the remaining steps to
    ``advance``, which every wait calls and a start never does.
    """

    def __init__(self, window: MPI.Win, position: int) -> None:
        self._window = window
        self._position = position
        self._open = _Delivery()
        self._pending: deque[_Delivery] = deque()
        self._notices: list[tuple[MPI.Request, Any]] = []

    @property
    def memory(self) -> Bytes | None:
        """Not reachable by load and store."""
        return None

    def put(self, offset: int, data: Bytes, *, stable: bool = False) -> None:
        """Begin to copy bytes into the peer's segment."""
        if data.nbytes == 0:
            return
        source = data if stable else data.copy()
        request = self._window.Rput(source, self._position, (offset, source.nbytes, MPI.BYTE))
        self._open.requests.append(request)
        self._open.keep.append(source)

    def notify(self, word: int, value: int, *, ordered: bool = True) -> None:
        """Set a notification word of the peer, at once or when the puts before it arrived."""
        if not ordered or not (self._open.requests or self._pending):
            self._send_notice(word, value)
            return
        self._open.notice = (word, value)
        self._pending.append(self._open)
        self._open = _Delivery()

    def advance(self) -> bool:
        """Advance what is pending; return whether nothing is left."""
        while self._pending and MPI.Request.Testall(self._pending[0].requests):
            done = self._pending.popleft()
            if done.requests:
                # Local completion came first, so that this flush only awaits the peer's answer.
                self._window.Flush(self._position)
            if done.notice:
                self._send_notice(*done.notice)
        self._notices = [(request, kept) for request, kept in self._notices if not request.Test()]
        return not self._pending and not self._notices

    def _send_notice(self, word: int, value: int) -> None:
        source = np.array([value], dtype=np.int64)
        request = self._window.Raccumulate(source, self._position, (word * 8, 1, MPI.INT64_T), op=MPI.REPLACE)
        self._notices.append((request, source))

"""The progress engine: a thread that lets MPI move data while this rank computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# While the rank is active; then, where ranks outnumber cores; and when it has not been for a while.
_BUSY_SECONDS = 1e-4
_CROWDED_SECONDS = 1e-3
_QUIET_SECONDS = 5e-3
_QUIET_AFTER_SECONDS = 2.0
_JOIN_SECONDS = 2.0
# A pause is at least so many turns long: what the thread takes of a core, the rank may be computing on.
_PAUSE_TURNS = 16
_LONGEST_PAUSE_SECONDS = 4e-3


class ProgressEngine:
    """Calls ``turn()`` over and over in a daemon thread, which never keeps a process from exiting.

    Between nodes a transport in software moves data only while both ends call MPI. The thread does so while
    torch computes, which releases the interpreter lock. ``turn`` advances what is under way, does not block,
    and returns a number that changes while the rank is active. Where ranks outnumber cores, ``crowded``, the
    thread takes fewer turns, since one costs somebody's time.
    """

    def __init__(self, turn: Callable[[], int], crowded: bool) -> None:
        self._turn = turn
        self._pause = _CROWDED_SECONDS if crowded else _BUSY_SECONDS
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distdl_rma progress", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        seen, quiet, pause = 0, 0.0, self._pause
        while not self._stop.wait(_QUIET_SECONDS if quiet > _QUIET_AFTER_SECONDS else pause):
            begin = time.thread_time()
            try:
                active = self._turn()
            except BaseException as error:  # noqa: BLE001
                # Whatever it is belongs to the rank's own thread, which finds it in its next call.
                self.error = error
                return
            turn = time.thread_time() - begin
            pause = max(self._pause, min(_PAUSE_TURNS * turn, _LONGEST_PAUSE_SECONDS))
            quiet = quiet + pause if active == seen else 0.0
            seen = active

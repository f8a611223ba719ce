"""What is under way on a machine, and who takes its next steps."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from distdl_rma.errors import DistdlError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport.progress_thread import ProgressEngine
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.failure_notices import FailureNotices
from distdl_rma.segments.waiting.open_machines import advance_other_machines, register, unregister


class PendingWork:
    """Steps that remain to be taken on a machine: by every wait, every ``progress()``, the progress engine.

    So ranks may wait for what they do together in different orders. Waits in another machine of the process
    take them too. Whoever takes steps holds the segment's lock, and takes in notices of failed ranks with
    them; the counters tell the progress engine whether the rank is active.
    """

    def __init__(self, segment: Segment, notices: FailureNotices, counters: Counters) -> None:
        self._segment, self.notices, self._counters = segment, notices, counters
        self._open = True
        self._steps: list[Callable[[], bool]] = []
        self._advancing = False
        self._engine: ProgressEngine | None = None
        # What went wrong in a step that was taken while the rank waited in another machine.
        self._trouble: Exception | None = None

    @property
    def engine(self) -> str:
        """What takes steps while the rank computes: ``"thread"`` or ``"none"``."""
        return "thread" if self._engine is not None else "none"

    def begin(self, engine: str) -> None:
        """Have other waits of this process, and an engine if there is to be one, take steps from now on."""
        register(self)
        if engine == "thread":
            self._engine = ProgressEngine(self._turn, self._segment.crowded)

    def stop(self) -> None:
        """End the progress engine; idempotent."""
        if self._engine is not None:
            self._engine.stop()

    def end(self) -> None:
        """Undo ``begin``; idempotent. What the engine still does is over then, or has no effect."""
        unregister(self)
        self.stop()
        self._open = False

    def defer(self, advance: Callable[[], bool]) -> None:
        """Have ``advance()`` called again and again until it returns True."""
        # The progress engine goes through the steps, and takes out what is done.
        with self._segment.lock:
            if advance not in self._steps:
                self._steps.append(advance)

    def withdraw(self, advance: Callable[[], bool]) -> None:
        """Undo ``defer``; whoever finds its work done early calls it."""
        with self._segment.lock:
            if advance in self._steps:
                self._steps.remove(advance)

    def advance(self) -> None:
        """Take all steps that can be taken at once, of all machines of this process; does not block.

        Raises what went wrong in a step of this machine, now or meanwhile.
        """
        self._advance()
        advance_other_machines(self)

    def advance_quietly(self) -> None:
        """Take steps while the rank waits in another machine; does not block.

        What goes wrong belongs to this machine: its next wait raises it, and takes steps again.
        """
        if self._trouble is None and (self._engine is None or self._engine.error is None):
            try:
                self._turn()
            except (DistdlError, MPI.Exception) as error:
                self._trouble = error

    def _advance(self) -> None:
        if self._engine is not None and self._engine.error is not None:
            raise self._engine.error
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble
        with self._segment.lock:
            self._segment.progress()
            if self._open:
                self.notices.poll()
            if self._steps and not self._advancing:
                # A step may wait itself, and that wait comes back here.
                self._advancing = True
                try:
                    for advance in tuple(self._steps):
                        if advance():
                            self.withdraw(advance)
                finally:
                    self._advancing = False

    def _turn(self) -> int:
        # Left to a thread that already takes steps, if there is one.
        if self._segment.lock.acquire(blocking=False):
            try:
                if self._open and not self.notices.failures:
                    self._advance()
            finally:
                self._segment.lock.release()
        counters = self._counters
        return counters.puts + counters.gets + counters.waits

"""Steps that are generators: any wait of the rank takes them further, whatever it waits for.

A generator yields where it would wait, so that a rank has several steps under way and never waits in one::

    rank 0 waits for step A    advance(A)   advance(B)   advance(A)   ...
    rank 1 waits for step B                 ^ goes on, although rank 0 waits for another one
"""

from __future__ import annotations

from collections.abc import Iterator

from distdl_rma.segments.manager import SegmentManager


class Scripted:
    """A step that is a generator; waits advance it, and so does the progress engine in its thread.

    Whoever advances it holds the lock of the segment. A step that raised is ``broken`` for ever: its
    generator is over, MPI may still use its memory, and other ranks may still write to it.
    """

    def __init__(self, manager: SegmentManager) -> None:
        self._lock = manager.segment.lock
        self._running: Iterator[None] | None = None
        # The error that interrupted a step, which cannot be continued; empty if none did.
        self.broken = ""

    def advance(self) -> bool:
        """Advance the step; return whether it is complete, or broken for ever."""
        with self._lock:
            if self._running is not None:
                try:
                    for _ in self._running:
                        return False
                except BaseException as error:
                    # A generator that raised is over, and would look complete.
                    self.broken, self._running = self.broken or repr(error), None
                    raise
                self._running = None
            return True

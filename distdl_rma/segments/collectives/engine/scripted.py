"""Steps that are generators: they yield as long as they have to wait."""

from __future__ import annotations

from collections.abc import Iterator

from distdl_rma.segments.manager import SegmentManager


class Scripted:
    """Whose step is a generator, which waits advance, and the progress engine, which is another thread."""

    def __init__(self, manager: SegmentManager) -> None:
        self._lock = manager.segment.lock
        self._running: Iterator[None] | None = None
        # What interrupted a step in the middle, which cannot be taken up again; empty if nothing did.
        self.broken = ""

    def advance(self) -> bool:
        """Advance the step; return whether it is complete, or will never be since it is broken."""
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

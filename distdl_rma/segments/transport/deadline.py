"""A deadline for calls of MPI that nobody can interrupt: past it, the process says why it ends, and ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

_TICK_SECONDS = 1.0


@contextmanager
def ends_process_after(seconds: float, why: str) -> Iterator[None]:
    """End this process, with a line on standard error and status 1, if the block takes longer; local.

    The launcher then ends the job: what hangs in MPI cannot be continued, nor can MPI be ended in order.
    """
    over = threading.Event()

    def watch() -> None:
        # Ticks, not a clock: a job that is suspended as a whole has not waited meanwhile.
        for ticks in count(1):
            if over.wait(_TICK_SECONDS):
                return
            if ticks * _TICK_SECONDS > seconds:
                break
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"distdl_rma: {why}\n")
            sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, name="distdl_rma deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()

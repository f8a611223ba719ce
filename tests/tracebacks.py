"""Tracebacks of all threads of a process that is asked for them, wherever it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import TextIO


def write_when_asked(file: TextIO) -> None:
    """Have this process write tracebacks to a file whenever it gets SIGUSR1; from its main thread.

    The thread that the signal comes to writes where it is at once. What faulthandler makes of other threads
    then is what their frames happened to be: one that goes on meanwhile ends the process by SIGSEGV now and
    then. So these are written by a thread that holds the lock of the interpreter, unless something hangs
    with it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False, chain=True)
    threading.Thread(target=_write, args=(read, file), name="tracebacks", daemon=True).start()


def _write(read: int, file: TextIO) -> None:
    # Python puts the number of each signal here that has a handler, whatever the main thread is doing.
    while numbers := os.read(read, 64):
        if signal.SIGUSR1 in numbers:
            faulthandler.dump_traceback(file, all_threads=True)

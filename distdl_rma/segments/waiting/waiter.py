"""Waits for other ranks, which advance operations under way; and a thread that does so between waits."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from mpi4py import MPI

from distdl_rma.errors import DistdlError, ExchangeTimeout
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.liveness import FailureNotices, PeerWatch
from distdl_rma.trace import Counters

# Pauses while the rank is active, if ranks outnumber cores, and after a time without activity.
_BUSY_SECONDS = 1e-4
_CROWDED_SECONDS = 1e-3
_QUIET_SECONDS = 5e-3
_QUIET_AFTER_SECONDS = 2.0
_JOIN_SECONDS = 2.0
# A pause is at least so many turns long: the rank may compute on the core of the thread.
_PAUSE_TURNS = 16
_LONGEST_PAUSE_SECONDS = 4e-3


class ProgressEngine:
    """Calls ``turn()`` again and again in a daemon thread, which never keeps a process from exiting.

    Between nodes a transport in software moves data only while both ends call MPI. The thread calls it while
    torch computes, which releases the interpreter lock. ``turn`` advances operations, does not block, and
    returns a number that changes while the rank is active. If ranks outnumber cores, ``crowded``, the thread
    takes fewer turns, since each costs a rank's time.
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
                # The rank's own thread raises it in its next call.
                self.error = error
                return
            turn = time.thread_time() - begin
            pause = max(self._pause, min(_PAUSE_TURNS * turn, _LONGEST_PAUSE_SECONDS))
            quiet = quiet + pause if active == seen else 0.0
            seen = active


_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (5e-5, 1e-3)
# Seconds between two looks of a long wait, which writes its reason and reads the headers of other ranks.
_LOOK_SECONDS = 0.1
# More seconds than these between two looks mean that the process or the machine was stopped.
_STOPPED_SECONDS = 1.0


def stopped(seconds: float) -> float:
    """Seconds between two looks for which this process, or the whole machine, was stopped."""
    return seconds if seconds > _STOPPED_SECONDS else 0.0


class Waiter:
    """Waits for other ranks, and the steps that every wait takes meanwhile.

    Every wait, every ``progress()`` and the progress engine take the deferred steps, so that ranks may wait
    for their common operations in different orders; waits in another machine of the process take them too.
    Steps hold the segment's lock, and come with receiving notices of failed ranks.

    ``timeout`` is the default deadline in seconds. Waits begin with ``spins`` turns of a busy loop, 0 if
    ranks outnumber cores or MPI must make progress; now and then ``watch`` looks at the other ranks. The
    ``counters`` add up the time, and tell the progress engine whether the rank is active.
    """

    def __init__(
        self,
        segment: Segment,
        notices: FailureNotices,
        watch: PeerWatch,
        counters: Counters,
        timeout: float,
        spins: int,
    ) -> None:
        self._segment, self._notices, self._watch = segment, notices, watch
        self.counters, self.timeout, self.spins = counters, check_timeout(timeout), spins
        self._open = True
        self._steps: list[Callable[[], bool]] = []
        self._advancing = False
        self._engine: ProgressEngine | None = None
        # Error of a step that was taken while the rank waited in another machine.
        self._trouble: Exception | None = None

    def until(
        self,
        ready: Callable[[], bool],
        reason: Callable[[], WaitReason],
        timeout: float | None = None,
        spins: int | None = None,
        whole: float | None = None,
    ) -> None:
        """Return as soon as ``ready()`` is true; blocking.

        ``ready`` is a cheap test without side effects, or one that advances the operation. ``reason`` returns
        the ranks and what they are to do; only long waits call it. ``timeout`` is in seconds, 0 to look once,
        ``spins`` are the turns of the busy loop for callers that have looked before, ``whole`` the seconds of
        a longer wait of which this is the last part. ``ExchangeTimeout`` at the deadline, or after about a
        second if ranks of one node wait for each other in a ring; the wait can be repeated.
        ``PeerFailedError`` if a rank of the machine failed, or one of the ranks has left.
        """
        if ready():
            return
        begin = time.perf_counter()
        try:
            seconds = self.timeout if timeout is None else check_timeout(timeout)
            self._wait(ready, reason, seconds, begin, self.spins if spins is None else spins, whole)
        finally:
            self.counters.waits += 1
            self.counters.seconds_waited += time.perf_counter() - begin

    def _wait(
        self,
        ready: Callable[[], bool],
        reason: Callable[[], WaitReason],
        timeout: float,
        begin: float,
        spins: int,
        whole: float | None,
    ) -> None:
        if timeout > 0:
            for _ in range(spins):
                if ready():
                    return
        watch = self._watch
        pause, looked, last = _SLEEP_SECONDS[0], 0.0, begin
        try:
            while True:
                self.advance()
                self._notices.check(reason)
                if ready():
                    return
                now = time.perf_counter()
                # The time for which the job was suspended does not count.
                begin += stopped(now - last)
                last, elapsed = now, now - begin
                if elapsed >= _YIELD_SECONDS and (not looked or elapsed - looked > _LOOK_SECONDS):
                    looked = elapsed
                    watch.look(reason())
                if elapsed > timeout:
                    said = timeout if whole is None else whole
                    raise ExchangeTimeout(watch.timeout_message(reason(), said))
                if elapsed < _YIELD_SECONDS:
                    os.sched_yield()
                else:
                    time.sleep(pause)
                    pause = min(pause * 1.5, _SLEEP_SECONDS[1])
        finally:
            if looked:
                watch.done()

    @property
    def under_way(self) -> bool:
        """Whether ``progress`` may have steps to take: some were deferred, or ranks are on other nodes."""
        return bool(self._steps) or self._segment.has_remote

    def progress(self) -> None:
        """Take all steps once, and raise if a rank failed; does not block."""
        self.advance()
        self._notices.check()

    @property
    def engine(self) -> str:
        """How steps are taken while the rank computes: ``"thread"`` or ``"none"``."""
        return "thread" if self._engine is not None else "none"

    def begin(self, engine: str) -> None:
        """Have other waits of this process, and the engine if chosen, take steps from now on."""
        _replace_open(weakref.ref(self))
        if engine == "thread":
            self._engine = ProgressEngine(self._turn, self._segment.crowded)

    def stop(self) -> None:
        """End the progress engine; idempotent."""
        if self._engine is not None:
            self._engine.stop()

    def end(self) -> None:
        """Undo ``begin``; idempotent. The engine takes no effective step any more."""
        _replace_open(without=self)
        self.stop()
        self._open = False

    def defer(self, advance: Callable[[], bool]) -> None:
        """Call ``advance()`` as a step until it returns True."""
        # The progress engine goes through the steps, and takes out what is done.
        with self._segment.lock:
            if advance not in self._steps:
                self._steps.append(advance)

    def withdraw(self, advance: Callable[[], bool]) -> None:
        """Undo ``defer``, when the operation is complete early."""
        with self._segment.lock:
            if advance in self._steps:
                self._steps.remove(advance)

    def advance(self) -> None:
        """Take all steps of all machines of this process once; does not block.

        Raises the error of a step of this machine, of now or since the last call.
        """
        self._advance()
        if len(_waiters) > 1:
            advance_other_machines(self)

    def advance_quietly(self) -> None:
        """Take steps while the rank waits in another machine; does not block.

        The next wait in this machine raises an error of a step, and takes steps again.
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
                self._notices.poll()
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
        # Nothing to do if another thread takes steps.
        if self._segment.lock.acquire(blocking=False):
            try:
                if self._open and not self._notices.failures:
                    self._advance()
            finally:
                self._segment.lock.release()
        return self.counters.puts + self.counters.gets + self.counters.waits


# Waiters of the open machines of this process: a wait in one machine advances the others as well. Weak, so
# that it keeps none alive. Replaced as a whole, so that readers need no lock: engines are other threads.
_waiters: tuple[weakref.ref[Waiter], ...] = ()
_replacing = threading.Lock()


def _replace_open(*more: weakref.ref[Waiter], without: Waiter | None = None) -> None:
    global _waiters  # noqa: PLW0603
    with _replacing:
        _waiters = (*(known for known in _waiters if known() not in (without, None)), *more)


def advance_other_machines(one: Waiter | None) -> None:
    """Have all open machines of this process but one take their steps; does not block."""
    for reference in _waiters:
        other = reference()
        if other is not None and other is not one:
            other.advance_quietly()

"""Waits for other ranks, which advance pending operations; ``progress.py`` does so between waits.

A wait over its time; a rank that waits for microseconds never leaves the first part::

    |  spins   | turns with a yield |  turns with sleeps, of 0.05 ms that grow to 1 ms
    |          |                    |
    0          spins                2 ms                                            timeout
               ^ each turn: take all steps, receive notices of failures, test
                                    ^ first look at the peers' headers, then ten a second

Spinning is fastest, and takes the core from the rank that is waited for if ranks outnumber cores: then there
are no spins. Steps are taken in every turn because the operation that a peer waits for may be another one
than this rank waits for: if a rank advanced only its own, two ranks could wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mpi4py import MPI

from distdl_rma.errors import DistdlError, ExchangeTimeout
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.virtual_ranks.comm import virtual_rank, wait_ended, while_blocked
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.liveness import FailureNotices, PeerWatch
from distdl_rma.segments.waiting.progress import ProgressEngine
from distdl_rma.trace import Counters

Test = Callable[[], bool]
Reason = Callable[[], WaitReason]
_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (5e-5, 1e-3)
# Seconds between two looks of a long wait. A look writes the wait's reason and reads headers of other ranks.
_LOOK_SECONDS = 0.1
# A longer time between two turns means that the process or the machine was stopped.
_STOPPED_SECONDS = 1.0


class Waiter:
    """Waits for other ranks; takes the deferred steps of operations during each wait.

    A wait never ends silently: ``ready()`` is true, or it raises ``ExchangeTimeout`` or ``PeerFailedError``.

    Every wait, every ``progress()`` and the progress engine take the deferred steps, so that ranks may wait
    for their common operations in different orders. Waits in another machine of the process take them too. A
    step is taken under the segment's lock, after failure notices were received.

    ``timeout`` is the default deadline in seconds. A wait begins with ``spins`` turns of a busy loop, 0 if
    ranks outnumber cores or MPI must make progress. A long wait lets ``watch`` look at the other ranks.
    ``counters`` add up waits and their time, and tell the progress engine whether the rank is active.
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
        self._hand_over, self._rank = segment.hand_over, virtual_rank()
        # How long a process sleeps next, where it does not yield.
        self._pause = _SLEEP_SECONDS[0]
        self._open = True
        self._steps: list[Callable[[], bool]] = []
        self._advancing = False
        # Who takes steps while the rank computes: ``"thread"``, or ``"none"``.
        self.engine = "none"
        self._engine: ProgressEngine | None = None
        self._end_turns: Callable[[], object] = bool
        # Error of a step that was taken while the rank waited in another machine.
        self._deferred_error: Exception | None = None

    def until(
        self,
        ready: Test,
        reason: Reason,
        timeout: float | None = None,
        spins: int | None = None,
        whole: float | None = None,
    ) -> None:
        """Return as soon as ``ready()`` is true; blocking.

        ``ready`` is a cheap test without side effects, or one that advances the operation. ``reason`` returns
        the ranks and what they have to do; only long waits call it. ``timeout`` is in seconds, 0 to test
        once. ``spins`` are the turns of the busy loop. ``whole`` are the seconds of a longer wait of which
        this is the last part.

        ``ExchangeTimeout`` at the deadline, or after about a second if ranks of one node wait for each other
        in a ring; the wait can be repeated. ``PeerFailedError`` if a rank of the machine failed, or one of
        the ranks left.
        """
        if ready():
            return
        begin = time.perf_counter()
        try:
            seconds = self.timeout if timeout is None else check_timeout(timeout)
            self._wait(ready, reason, seconds, begin, self.spins if spins is None else spins, whole)
            if self._hand_over is not None:
                wait_ended()
        finally:
            self.counters.waits += 1
            self.counters.seconds_waited += time.perf_counter() - begin

    def _wait(
        self, ready: Test, reason: Reason, timeout: float, begin: float, spins: int, whole: float | None
    ) -> None:
        if timeout > 0:
            for _ in range(spins):
                if ready():
                    return
        watch = self._watch
        self._pause, looked, last = _SLEEP_SECONDS[0], 0.0, begin
        try:
            while True:
                self.advance()
                self._notices.check(reason)
                if ready():
                    return
                now = time.perf_counter()
                # Time during which the job was suspended does not count.
                begin += now - last if now - last > _STOPPED_SECONDS else 0.0
                last, elapsed = now, now - begin
                if elapsed >= _YIELD_SECONDS and (not looked or elapsed - looked > _LOOK_SECONDS):
                    looked = elapsed
                    watch.look(reason())
                over = elapsed > timeout
                if over and not self._last_turn(ready):
                    seconds = timeout if whole is None else whole
                    raise ExchangeTimeout(watch.timeout_message(reason(), seconds))
                if over or self._rest(ready, elapsed):
                    return
        finally:
            if looked:
                watch.end_wait()

    def _rest(self, ready: Callable[[], bool], elapsed: float) -> bool:
        # Lets others compute; returns whether ``ready()`` was found to be true meanwhile.
        if self._hand_over is not None:
            return self._hand_over(ready)
        segment = self._segment
        # MPI copies large transfers in small pieces, one a call: sleeps took half of their time.
        moving = segment.has_remote and segment.keep_moving()
        if elapsed < _YIELD_SECONDS or (moving and not segment.crowded):
            os.sched_yield()
        else:
            time.sleep(_SLEEP_SECONDS[0] if moving else self._pause)
            self._pause = min(self._pause * 1.5, _SLEEP_SECONDS[1])
        return False

    def _last_turn(self, ready: Callable[[], bool]) -> bool:
        # At a deadline, lets ranks run that take turns: a loop of waits without time has an end.
        return self._hand_over is not None and (self._hand_over(ready) or ready())

    @property
    def under_way(self) -> bool:
        """Whether ``progress`` may have work: steps were deferred, or ranks are on other nodes."""
        return bool(self._steps) or self._segment.has_remote

    def progress(self) -> None:
        """Take all steps once, and raise if a rank failed; does not block. Virtual ranks take a turn each."""
        if self._hand_over is not None:
            self._hand_over(None)
            wait_ended()
        self.advance()
        self._notices.check()

    def begin(self, engine: str) -> None:
        """Let other machines' waits, and the progress engine if chosen, take steps from now on."""
        _replace_open(weakref.ref(self))
        self.engine = engine
        if engine == "thread" and self._hand_over is None:
            self._engine = ProgressEngine(self._turn, self._segment.crowded)
            self._end_turns = self._engine.stop
        elif engine == "thread":
            # A virtual rank has no other thread: it takes steps while it waits in calls of other libraries.
            self._end_turns = while_blocked(self.advance_quietly)

    def hold(self, held: ExitStack) -> None:
        """Take no turn of the progress engine until ``held`` ends; waits for the turn that it takes now."""
        if self._engine is not None:
            held.enter_context(self._segment.lock)

    def stop(self) -> None:
        """End the progress engine; idempotent."""
        self._end_turns()

    def end(self) -> None:
        """Undo ``begin``; idempotent. The engine takes no more effective steps."""
        _replace_open(without=self)
        self.stop()
        self._open = False

    def defer(self, advance: Callable[[], bool]) -> None:
        """Call ``advance()`` as a step until it returns True."""
        # The progress engine iterates over the steps and removes completed ones.
        with self._segment.lock:
            if advance not in self._steps:
                self._steps.append(advance)

    def withdraw(self, advance: Callable[[], bool]) -> None:
        """Undo ``defer``, for an operation that is complete before its last step."""
        with self._segment.lock:
            if advance in self._steps:
                self._steps.remove(advance)

    def advance(self) -> None:
        """Take all steps of all machines of this process once; does not block.

        Raises the error of a step of this machine, also one that occurred since the last call.
        """
        self._advance()
        if len(_waiters) > 1:
            advance_other_machines(self)

    def advance_quietly(self) -> None:
        """Take steps while the rank waits in another machine or library; does not block.

        After a step has raised, takes no further steps until the next wait in this machine raises that error.
        """
        if self._deferred_error is None and (self._engine is None or self._engine.error is None):
            try:
                self._turn()
            except (DistdlError, MPI.Exception) as error:
                self._deferred_error = error

    def _advance(self) -> None:
        # Takes the steps of this machine. An error of the progress thread stays: each later wait raises it.
        # One of a step in another machine's wait is raised once, by the machine that it belongs to.
        if self._engine is not None and self._engine.error is not None:
            raise self._engine.error
        if self._deferred_error is not None:
            error, self._deferred_error = self._deferred_error, None
            raise error
        with self._segment.lock:
            self._segment.progress()
            if self._open:
                self._notices.poll()
            if self._steps and not self._advancing:
                # A step may wait itself, and its wait calls this method.
                self._advancing = True
                try:
                    for advance in tuple(self._steps):
                        if advance():
                            self.withdraw(advance)
                finally:
                    self._advancing = False

    def _turn(self) -> int:
        # If another thread has the lock, it takes the steps.
        if self._segment.lock.acquire(blocking=False):
            try:
                if self._open and not self._notices.failures:
                    self._advance()
            finally:
                self._segment.lock.release()
        return self.counters.puts + self.counters.gets + self.counters.waits


# Waiters of this process's open machines: a wait in one advances the others too. Weak references keep no
# waiter alive. The tuple is replaced as a whole: other threads read it without a lock.
_waiters: tuple[weakref.ref[Waiter], ...] = ()
_replacing = threading.Lock()


def _replace_open(*more: weakref.ref[Waiter], without: Waiter | None = None) -> None:
    global _waiters  # noqa: PLW0603
    with _replacing:
        _waiters = (*(known for known in _waiters if known() not in (without, None)), *more)


def advance_other_machines(one: Waiter | None) -> None:
    """Let all open machines of this process, except that of ``one``, take their steps; does not block."""
    for reference in _waiters:
        other = reference()
        # Virtual ranks are threads of this process, with machines of their own.
        if other is not None and other is not one and other._rank in (None, virtual_rank()):
            other.advance_quietly()


@contextmanager
def engines_paused() -> Iterator[None]:
    """Keep the progress engines of this process out of MPI for a call that comes back soon."""
    with ExitStack() as held:
        for reference in _waiters:
            if (waiter := reference()) is not None:
                waiter.hold(held)
        yield

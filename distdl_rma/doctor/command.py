"""The examination step by step, each with a deadline; the first rank writes the result.

Who ends a step that hangs::

    in a wait of the library     its own timeout, with an error that says for whom
    in a call of MPI             a thread of this process: it writes what is known and ends the process
    in MPI's start               a forked child: no other thread of Python runs meanwhile
    in MPI's end                 faulthandler's timer, which needs no interpreter

Facts travel to the first rank by plain messages of mpi4py, not by the library, which is what is examined.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from distdl_rma.doctor.facts import Failure, Job, Launcher, rank_facts
from distdl_rma.doctor.findings import findings
from distdl_rma.doctor.report import as_json, as_text

# Waits of the library end with an error that says more.
_GRACE_SECONDS = 10.0
# MPI does not let other threads of Python run while it starts and ends.
_LAST_SECONDS = 5.0
_TICK_SECONDS = 0.2
_TAGS = {"send the facts": 3, "send the results": 4}


def doctor(json_file: str | None = None, timeout: float = 60.0) -> int:
    """Examine this job and write what is found; collective over its ranks. Returns the exit status.

    ``json_file`` is the file for the result as JSON, ``"-"`` standard output, where it takes the place of the
    text. In no step a rank waits longer than ``timeout`` seconds and a few more: if MPI does not return, the
    first rank writes what is known, and all processes end with status 1.
    """
    examination = _Examination(json_file, timeout)
    examination.carry_out()
    return examination.leave()


class _Examination:
    """What this rank knows so far; a thread ends the process if a step takes too long.

    ``_step`` and ``_deadline`` are what the thread watches; only ``_take`` changes them. The result is
    written once, at the end of the steps or by the thread, whichever is first: ``_lock`` decides.
    """

    def __init__(self, json_file: str | None, timeout: float) -> None:
        self._launcher = Launcher.seen(os.environ)
        self._json_file, self._timeout = json_file, timeout
        self._rank, self._size = self._launcher.rank, 1
        self._job, self._status = Job(), 0
        self._step, self._deadline, self._written = "begin", float("inf"), False
        self._lock = threading.Lock()

    def carry_out(self) -> None:
        """All steps, up to the first that fails; then the first rank writes the result."""
        started = self._take("start MPI", self._start)
        threading.Thread(target=self._watch, name="distdl_rma doctor", daemon=True).start()
        self._take("load torch", partial(import_module, "torch"))
        mine = rank_facts(self._launcher)
        self._job.ranks = [mine]
        if not started:
            self._write()
            return
        facts = self._gathered("send the facts", mine)
        self._job.ranks = [facts[rank] for rank in sorted(facts)]
        # Where no processes know each other there is nothing to try.
        ready = not self._job.failures and (self._size > 1 or self._launcher.ranks < 2)
        # Not loaded before MPI has started: it would start it.
        if ready and self._take("load distdl_rma", partial(import_module, f"{__package__}.measurements")):
            from distdl_rma.doctor.measurements import measure

            measure(self._job, self._timeout, self._take)
        self._merge(self._gathered("send the results", self._job))
        self._write()

    def leave(self) -> int:
        """End MPI and return the exit status; where MPI does not end, end the process."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None:
            with _ends_after(self._limit if self._rank else _LAST_SECONDS):
                # Under python -m mpi4py a status other than 0 would abort a job that is still in MPI.
                mpi.Finalize()
        return self._status

    @property
    def _limit(self) -> float:
        # Of a step. With any process that ends, the launcher may end all: the first rank comes first, which
        # waits for an error of its own and then for the results of the others.
        return self._timeout + _GRACE_SECONDS + (self._timeout + _GRACE_SECONDS if self._rank else 0.0)

    def _take(self, step: str, call: Callable[[], object]) -> Any:
        # Carries out a step under a deadline; an error becomes a failure of this rank in the job's facts, and
        # the result is False.
        self._step, self._deadline = step, time.monotonic() + self._limit
        try:
            with _ends_after(self._limit + _LAST_SECONDS):
                return call() or True
        except Exception as error:  # noqa: BLE001
            message = str(error).strip() or "no message"
            self._job.failures.append(Failure(self._rank, step, f"{type(error).__name__}: {message}"))
            return False
        finally:
            self._deadline = float("inf")

    def _start(self) -> None:
        with self._reported_by_child():
            from mpi4py import MPI

        self._size = MPI.COMM_WORLD.size
        if self._size > 1:
            self._rank = MPI.COMM_WORLD.rank

    @contextmanager
    def _reported_by_child(self) -> Iterator[None]:
        # While no other thread of this process can run.
        seen, over = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(over)
                if not select.select([seen], [], [], self._limit)[0]:
                    self._job.ranks = [rank_facts(self._launcher)]
                    self._report_timeout()
            finally:
                os._exit(0)
        os.close(seen)
        try:
            yield
        finally:
            os.close(over)
            os.waitpid(child, 0)

    def _gathered(self, step: str, mine: Any) -> dict[int, Any]:
        # On the first rank what all ranks sent in time, by rank; elsewhere what is this rank's own.
        found = {self._rank: mine}
        if self._size > 1:
            self._take(step, lambda: self._gather(found, mine))
        return found

    def _gather(self, found: dict[int, Any], mine: Any) -> None:
        # Not by MPI's gather, which waits for ever for a rank that hangs: the first rank takes what comes.
        from mpi4py import MPI

        comm, status, until = MPI.COMM_WORLD, MPI.Status(), time.monotonic() + self._timeout
        tag = _TAGS[self._step]
        sent = comm.isend(mine, 0, tag) if self._rank else None
        while time.monotonic() < until:
            if sent is not None:
                if sent.test()[0]:
                    return
            elif (message := comm.improbe(tag=tag, status=status)) is not None:
                found[status.Get_source()] = message.recv()
                continue
            elif len(found) == self._size:
                return
            time.sleep(1e-3)
        missing = sorted(set(range(self._size)) - set(found)) if sent is None else []
        for rank in missing:
            self._job.failures.append(Failure(rank, self._step, f"nothing came within {self._timeout:g} s"))

    def _merge(self, jobs: dict[int, Job]) -> None:
        job = jobs.pop(self._rank)
        for _, other in sorted(jobs.items()):
            job.failures += other.failures
            job.transports |= other.transports
            # Which rank saw the difference makes none.
            job.compared += [each for each in other.compared if not each.equal and each not in job.compared]

    def _write(self) -> None:
        with self._lock:
            if self._rank or self._written:
                return
            self._written = True
        found = findings(self._job)
        result = json.dumps(as_json(self._job, found), indent=2) + "\n"
        self._status = int(any(finding.level == "error" for finding in found))
        if self._json_file != "-":
            sys.stdout.write(as_text(self._job, found))
        elif self._json_file is not None:
            sys.stdout.write(result)
        sys.stdout.flush()
        if self._json_file not in (None, "-"):
            try:
                Path(self._json_file).write_text(result)
            except OSError as error:
                sys.stderr.write(f"distdl_rma doctor: {error}\n")
                self._status = 1

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(_TICK_SECONDS)
        self._report_timeout()
        os._exit(1)

    def _report_timeout(self) -> None:
        message = f"TimeoutError: it does not return within {self._limit:g} s"
        self._job.failures.append(Failure(self._rank, self._step, message))
        self._write()


@contextmanager
def _ends_after(seconds: float) -> Iterator[None]:
    # End this process with status 1, whatever it does, if the block takes longer.
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

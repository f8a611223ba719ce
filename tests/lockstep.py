"""Keeps the pytest processes of one MPI run in step, and ends all of them with tracebacks when one hangs.

A test under MPI is one test that runs on all ranks. So the ranks agree on the outcome of each of its phases:
what fails on one rank fails on all, and no rank goes on to the next test while another is in the last one.
"""

from __future__ import annotations

import enum
import os
import signal
import socket
import struct
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tests.tracebacks import write_when_asked

if TYPE_CHECKING:
    from mpi4py import MPI

SECONDS_AFTER_FAILURE = 20.0
SECONDS_OTHERWISE = 600.0
SECONDS_TO_DUMP = 1.0
# Between two looks whether the others have come: at first short ones, for most come at the same time.
SHORTEST_SLEEP, LONGEST_SLEEP = 20e-6, 500e-6
# The ranks run out of patience one after the other, so that one of them speaks for all.
SECONDS_PER_RANK = 2.0

# Set by run_mpi.py: the folder in which ranks leave what it shows when a run has failed.
FOLDER_VARIABLE = "RUN_MPI_FOLDER"

# A report as it travels: outcome, checksum of the step, and as much of the reason as fits.
WIRE = struct.Struct("=BI251s")


class Outcome(enum.IntEnum):
    """How a phase of a test ended on one rank."""

    PASSED = 0
    FAILED = 1
    SKIPPED = 2


class Report(NamedTuple):
    """One rank's account of a step: how it ended there, which step it was, and why it ended so."""

    outcome: int
    step: int
    reason: bytes


class Lockstep:
    """The ranks of the run, seen from this one. Construction is collective, and so is every `agree`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        # A communicator of its own: what a test leaves unreceived cannot be mistaken for a report.
        self._comm = comm.Dup()
        self._rank, self._size = comm.rank, comm.size
        self._failed = False
        self._timer: threading.Timer | None = None
        # A file of its own as well, since pytest captures the usual one while a test runs.
        self._stderr = os.fdopen(os.dup(2), "w", buffering=1)
        folder = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._tracebacks = self._file("tracebacks").open("a") if self._folder else self._stderr
        write_when_asked(self._tracebacks)
        self._processes = self._comm.allgather((_where_pids_hold(), os.getpid()))

    def agree(self, step: str, outcome: Outcome, error: BaseException | None = None) -> str | None:
        """Wait for all ranks to end this step; return why it counts as failed, None where it does not.

        A rank that failed waits a short time only: the others may be waiting for what it did not do.
        """
        self._failed |= outcome is Outcome.FAILED
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0] if error else ""
        mine = Report(outcome, zlib.crc32(step.encode()), reason.encode())
        reports = self._gather(mine, step, error)
        if any(report.step != mine.step for report in reports):
            time.sleep(self._in_turn(0))
            self.end_job(f"the ranks are out of step, this one is at the {step}")
        return verdict(outcome, reports)

    def _gather(self, mine: Report, step: str, error: BaseException | None) -> list[Report]:
        failed = mine.outcome == Outcome.FAILED
        deadline = self._in_turn(SECONDS_AFTER_FAILURE if failed else SECONDS_OTHERWISE)
        received = bytearray(WIRE.size * self._size)
        request = self._comm.Iallgather(bytearray(WIRE.pack(*mine)), received)
        begin = time.monotonic()
        told, sleep = not failed, SHORTEST_SLEEP
        while not request.Test():
            time.sleep(sleep)
            sleep = min(1.2 * sleep, LONGEST_SLEEP)
            seconds = time.monotonic() - begin
            if not told and seconds > 1:
                # Should the job be ended, pytest will not come to its own account of the failure.
                self._say(f"the {step} failed and waits for the other ranks:")
                traceback.print_exception(error, limit=-8, file=self._stderr)
                told = True
            if seconds > deadline:
                self.end_job(f"the {step} has ended here, but {deadline:g} s later not on all ranks")
        return [Report(*fields) for fields in WIRE.iter_unpack(received)]

    def start_timer(self, step: str, seconds: float) -> None:
        """End the job if this step is not over after so many seconds."""
        reason = f"{step} is not over after {seconds:g} s"
        self._timer = threading.Timer(self._in_turn(seconds), self.end_job, [reason])
        self._timer.daemon = True
        self._timer.start()

    def cancel_timer(self) -> None:
        """Stop the clock; does nothing when it is not running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_job(self, reason: str) -> NoReturn:
        """End all ranks, after each has written the tracebacks of its threads."""
        self._say(f"{reason}; all ranks write their tracebacks and end")
        for place, pid in self._processes:
            if place == _where_pids_hold():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(SECONDS_TO_DUMP)
        # Not MPI's Abort, which might wait for a lock of the hanging thread. The launcher ends the others.
        os._exit(1)

    def claim_innocence(self) -> None:
        """Leave word for run_mpi.py that the output of this rank adds nothing, if no step failed here."""
        if self._folder and not self._failed:
            self._file("innocent").touch()

    def _file(self, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"rank-{self._rank}.{kind}"

    def _in_turn(self, seconds: float) -> float:
        return seconds + SECONDS_PER_RANK * self._rank

    def _say(self, text: str) -> None:
        self._stderr.write(f"\nrank {self._rank} of {self._size}: {text}\n")


def _where_pids_hold() -> str:
    # Not the host's name: several hosts may be played by one kernel, and share its processes.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def verdict(outcome: Outcome, reports: list[Report]) -> str | None:
    """Say why a step that ended with this outcome here counts as failed, None where it does not."""
    failed = [
        f"failed on rank {rank}: {report.reason.rstrip(bytes(1)).decode(errors='ignore')}".rstrip(": ")
        for rank, report in enumerate(reports)
        if report.outcome == Outcome.FAILED
    ]
    if failed:
        return "\n".join(failed)
    skipped = [rank for rank, report in enumerate(reports) if report.outcome == Outcome.SKIPPED]
    if skipped and len(skipped) < len(reports):
        return f"skipped on ranks {skipped} only: a test runs on all ranks or on none"
    return None

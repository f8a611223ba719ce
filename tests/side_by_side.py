"""Run shell commands side by side: ``tests/side_by_side.py 'make lint' 'make types' ...``.

What each has said is shown as a whole when it is over, and of those that failed at the end. A table says how
long each took, by the clock and in seconds of a processor. The exit status is 0 when that of all is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple, NoReturn

SECONDS_TO_END = 20


class Job(NamedTuple):
    """A command that is running."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    begin: float

    def show(self) -> None:
        print(f"\n{f' {self.name} ':#^100}", flush=True)
        self.output.seek(0)
        print(self.output.read().decode(errors="replace").strip(), flush=True)


class Result(NamedTuple):
    """How a command ended, and what it took."""

    job: Job
    status: int
    seconds: float
    processor: float

    def __str__(self) -> str:
        outcome = "passed" if self.status == 0 else f"failed with status {self.status}"
        took = f"{self.seconds:.0f} s, {self.processor:.0f} s of a processor"
        return f"{self.job.name}: {outcome} after {took}"


def main(commands: Mapping[str, str]) -> int:
    """Run all commands, by their names, at the same time; return the exit status."""
    signal.signal(signal.SIGTERM, leave)
    print("side by side:", ", ".join(commands), flush=True)
    jobs = [start(name, command) for name, command in commands.items()]
    results: list[Result] = []
    try:
        while len(results) < len(jobs):
            result = next_to_end(jobs)
            results.append(result)
            if result.status == 0:
                result.job.show()
            print(f"\n{result}", flush=True)
    finally:
        end(jobs)
    failed = [result for result in results if result.status]
    for result in failed:
        result.job.show()
    heading = " side by side "
    print(f"\n{heading:#^100}", *sorted(results, key=lambda result: result.status != 0), sep="\n", flush=True)
    return 1 if failed else 0


def start(name: str, command: str) -> Job:
    # A file, not a pipe: nobody has to read along. A group of processes, so that all of it can be ended.
    output = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    return Job(name, process, output, time.monotonic())


def next_to_end(jobs: Sequence[Job]) -> Result:
    """Wait for one of the jobs to end."""
    pid, status, usage = os.wait3(0)
    job = next(job for job in jobs if job.process.pid == pid)
    job.process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - job.begin
    return Result(job, job.process.returncode, seconds, usage.ru_utime + usage.ru_stime)


def end(jobs: Sequence[Job]) -> None:
    """End what still runs."""
    running = [job for job in jobs if job.process.returncode is None]
    for job in running:
        os.killpg(job.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    for job in running:
        try:
            job.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(job.process.pid, signal.SIGKILL)


def leave(number: int, _: object) -> NoReturn:
    """Leave by an exception, so that the jobs are ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main({command: command for command in sys.argv[1:]}))

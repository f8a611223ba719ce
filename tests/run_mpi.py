"""Run the MPI tests under several numbers of ranks: ``tests/run_mpi.py --ranks 1 2 3 4``.

Every run is one ``mpiexec`` of pytest on all ranks. Rank 0 reports on this terminal; the other ranks write to
files, which are shown when something went wrong there. A run that exceeds its time limit is asked for the
tracebacks of all ranks before it is ended. What keeps the ranks in step is in ``lockstep.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

AS_RANK = "--as-rank"
FOLDER_VARIABLE = "RUN_MPI_FOLDER"
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# Open MPI wants permission to run as root and to start more ranks than cores, and it reports on every window
# that UCX cannot serve it, unless UCX is left out. Of its waits it gives the core away only where one job has
# more ranks than cores; in two of three pairs, jobs that ran beside each other took 1.4 times as long without
# yielding. MPICH reads none of these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
SECONDS_TO_DUMP = 2
SECONDS_TO_END = 10
# What processes may need to end behind their launcher, or when they are asked.
SECONDS_TO_FOLLOW = 3
# What a job or a test has started carries its mark in this variable, behind those of what started it.
MARKS_VARIABLE = "TEST_JOB_MARKS"
SECONDS_PER_DAY = 86400
# Where every test runs once in thirty days: on how many ranks each day.
RANKS_OF_DAYS = (2, 3, 2, 3, 4, 2, 3, 2, 3, 1) * 3
# Frames that every traceback has, whatever the test does.
MACHINERY = ("/pluggy/", "/_pytest/", "/pytest/", "/mpi4py/", "<frozen runpy>", "/threading.py")


def main(arguments: Sequence[str]) -> int:
    """Run pytest once per number of ranks; return the exit status, 0 when all passed on all ranks."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--ranks N ...] [--day DAY [--once | --turns | --seldom]] [--limit SECONDS]"
        " [--mpiexec COMMAND] [-- OPTION ...]",
        description="Run the MPI tests under several numbers of ranks; what follows -- goes to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="a run for each number")
    parser.add_argument("--day", type=day, help="of the tests those of a day, such as today; without it all")
    parser.add_argument("--once", action="store_true", help="each test on one of its numbers of ranks a day")
    parser.add_argument("--turns", action="store_true", help="each test on one of the --ranks a day")
    parser.add_argument("--seldom", action="store_true", help="a thirtieth of all, on ranks of that day")
    parser.add_argument("--limit", type=float, default=3000, help="seconds that one run may take")
    parser.add_argument("--mpiexec", default=default_mpiexec(), help="the launcher, with its options")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, pytest_options = parser.parse_args(arguments[:end]), [*arguments[end + 1 :]]
    if options.day is not None:
        pytest_options += ["--day", str(options.day)]
    if options.once:
        pytest_options += ["--once"]
    if options.turns:
        pytest_options += ["--among", ",".join(map(str, options.ranks))]
    if options.seldom:
        if options.day is None:
            parser.error("--seldom is of a --day")
        options.ranks = [RANKS_OF_DAYS[options.day % len(RANKS_OF_DAYS)]]
        pytest_options += ["--seldom"]

    failures = []
    for ranks in options.ranks:
        heading = f" MPI tests, {ranks} rank{'s' * (ranks > 1)} "
        print(f"\n{heading:#^100}", flush=True)
        problem = run(shlex.split(options.mpiexec), ranks, options.limit, pytest_options)
        if problem:
            failures.append(f"with {ranks} rank{'s' * (ranks > 1)}: {problem}")
    for failure in failures:
        print(f"run_mpi: failed {failure}", flush=True)
    return 1 if failures else 0


def day(name: str) -> int:
    """Return the number of a day, which stays the same when a run goes on past midnight."""
    return int(time.time() // SECONDS_PER_DAY) if name == "today" else int(name)


def default_mpiexec() -> str:
    """Return the launcher that is installed beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return shlex.quote(str(beside)) if beside.exists() else "mpiexec"


def mpiexec(ranks: int) -> list[str]:
    """Return the beginning of a command that runs on some ranks of this machine."""
    return [*shlex.split(default_mpiexec()), "-n", str(ranks)]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment in which every test starts its launcher: one thread per rank, this package.

    What a rank compiles is kept for all others and for the next job, also where Python is told otherwise.
    ``tests/startup/sitecustomize.py`` says what its Python leaves out.
    """
    ours = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    here = Path(__file__).parent
    ours["PYTHONPATH"] = os.pathsep.join(map(str, (here / "startup", here.parent)))
    return OPEN_MPI | os.environ | ours | changes


def run(launcher: Sequence[str], ranks: int, limit: float, pytest_options: Sequence[str]) -> str | None:
    """Run pytest on this many ranks, and return what went wrong, None when nothing did."""
    with tempfile.TemporaryDirectory(prefix="run-mpi-") as name:
        folder = Path(name)
        command = [*launcher, "-n", str(ranks), sys.executable, __file__, AS_RANK, name, *pytest_options]
        problem = None
        # Tests of many subjects in one process: they find torch as it is.
        with launched(command, AS_USERS_START="1") as job:
            try:
                status = job.wait(timeout=limit)
                if status:
                    problem = f"exit status {status}"
            except subprocess.TimeoutExpired:
                problem = f"not finished after {limit:g} s"
                ask_for_tracebacks(folder)
        if problem:
            show_outputs(folder, ranks)
            show_tracebacks(folder, ranks)
        return problem


@contextlib.contextmanager
def launched(
    command: Sequence[str],
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
    cwd: Path | None = None,
    **changes: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the launcher, and end all of its job on the way out, however that went."""
    env = environment(**changes)
    mark = env[MARKS_VARIABLE] = marked_again(env.get(MARKS_VARIABLE, ""))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=cwd, env=env
    ) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                # With the time that it needs where the machine is busy.
                launcher.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=SECONDS_TO_END)
            end_all(mark)


def marked_again(marks: str) -> str:
    """Marks that a process has, and a new one behind them."""
    return f"{marks}[{secrets.token_hex(8)}]"


def processes(mark: str) -> dict[int, str]:
    """Processes that carry a mark, and their commands; this one excepted. Empty where there is no ``/proc``.

    Neither groups, nor sessions, nor parents tell: Open MPI's ranks are a group each, and outlive a launcher
    that is killed, which has another parent as soon as a shell in front of it is no more.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at, and belong to somebody else.
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                found[int(folder.name)] = shlex.join(command.rstrip("\0").split("\0"))
    return found


def end_all(mark: str, patience: float = SECONDS_TO_FOLLOW) -> list[str]:
    """End the processes that carry a mark, and return the commands of those that did not end by themselves.

    First they are asked: a launcher ends its ranks, and clears up behind them.
    """
    left: dict[int, str] = {}
    steps = ((None, patience), (signal.SIGTERM, SECONDS_TO_FOLLOW), (signal.SIGKILL, SECONDS_TO_END))
    for number, seconds in steps:
        found = processes(mark)
        if number is not None:
            left |= found
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while found and time.monotonic() < deadline:
            time.sleep(0.02)
            found = processes(mark)
        if not found:
            break
    return [*left.values()]


def completed(
    command: Sequence[str], limit: float = 200, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end; past the limit, in seconds, it is ended, and what it said is in the error.

    It speaks into files, not pipes: a pipe is open for as long as anything lives that the job has started.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with launched(command, stdout, stderr, cwd, **changes) as job:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=limit)
            over = job.returncode is not None
        said = []
        for file in (stdout, stderr):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    if not over:
        raise TimeoutError(f"not over after {limit:g} s: {shlex.join(command)}\n{''.join(said)}")
    return subprocess.CompletedProcess(command, job.returncode, *said)


def ask_for_tracebacks(folder: Path) -> None:
    """Ask every rank of the running job for the tracebacks of its threads, and wait while it writes them."""
    for file in sorted(folder.glob("*.pid")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGUSR1)
    time.sleep(SECONDS_TO_DUMP)


def show_outputs(folder: Path, ranks: int) -> None:
    """Print what the ranks other than 0 wrote, but for those that say that nothing went wrong there.

    Where all say so, something went wrong behind their tests: the output of all of them is printed.
    """
    others = range(1, ranks)
    guilty = [rank for rank in others if not (folder / f"rank-{rank}.innocent").exists()]
    for rank in guilty or others:
        output = folder / f"rank-{rank}.output"
        if output.exists():
            heading = f" output of rank {rank} of {ranks} "
            print(f"\n{heading:-^100}\n{output.read_text(errors='replace').strip()}", flush=True)


def show_tracebacks(folder: Path, ranks: int) -> None:
    """Print where each rank was when it was asked, without the frames of pytest."""
    for rank in range(ranks):
        file = folder / f"rank-{rank}.tracebacks"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        if lines:
            heading = f" where rank {rank} of {ranks} was "
            telling = [line for line in lines if not any(part in line for part in MACHINERY)]
            print(f"\n{heading:-^100}", *telling, sep="\n", flush=True)


def become_rank(folder: Path, pytest_options: Sequence[str]) -> None:
    """Turn this process into pytest on its rank: rank 0 keeps the terminal, the others write to a file."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)
    if rank is None:
        raise SystemExit(f"run_mpi: {', '.join(RANK_VARIABLES)}: the launcher must set one of these")
    # Until conftest.py has installed its handler, a request for tracebacks must not end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    os.environ[FOLDER_VARIABLE] = str(folder)
    if rank != 0:
        output = os.open(folder / f"rank-{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
    # -m mpi4py: an exception that escapes on one rank ends the job. No cache: ranks would share its files.
    pytest = ["-m", "pytest", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", "--no-header"]
    os.execv(sys.executable, [sys.executable, "-m", "mpi4py", *pytest, *pytest_options])


def end_on_signal(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that the launcher is ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        become_rank(Path(sys.argv[2]), sys.argv[3:])
    signal.signal(signal.SIGTERM, end_on_signal)
    raise SystemExit(main(sys.argv[1:]))

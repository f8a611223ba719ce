"""What all tests share: the communicator, and one outcome per test under MPI, however many ranks run it."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import matrix, record
from tests.lockstep import Lockstep, Outcome
from tests.run_mpi import MARKS_VARIABLE, day, end_all, marked_again

if TYPE_CHECKING:
    import pytest_timeout
    import torch
    from mpi4py import MPI
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    from distdl_rma import Machine, Partition

# Between hosts the library itself goes the way that is forced elsewhere.
ON_TWO_HOSTS = "TWO_HOSTS_RANKS" in os.environ
TRANSPORTS = ["auto"] if ON_TWO_HOSTS else ["auto", "remote"]
LOCKSTEP = pytest.StashKey[Lockstep]()
# What the file of a test of make test-processes or test-slow has in it, or the conftest.py beside it.
NEEDED = {"mpi and processes": ("mark.processes", 'marker("processes")'), "slow and not mpi": ("mark.slow",)}
SHARE_A_JOB = ("tests/test_docs.py",)
LEFT_OUT = pytest.StashKey[str]()
LEFT = pytest.StashKey[int]()
BEGIN = pytest.StashKey[float]()

# The same examples on every run and every rank; no database, so that nothing is left in the working tree.
hypothesis.settings.register_profile("distdl_rma", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("distdl_rma")
# Ranks draw the same programs only if no constants of modules are among the numbers: a rank alone may have
# loaded some, as those of kernels that Inductor has compiled for its block.
_PROVIDERS: Any = import_module("hypothesis.internal.conjecture.providers")
_PROVIDERS._get_local_constants = lambda: _PROVIDERS._local_constants


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks of the run; importing MPI only here keeps it out of the tests that need none."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """End what the tests of this process have started and left, and fail for it."""
    if request.config.getoption("--with-mpi"):
        yield
        return
    before = os.environ.get(MARKS_VARIABLE, "")
    mark = os.environ[MARKS_VARIABLE] = marked_again(before)
    yield
    os.environ[MARKS_VARIABLE] = before
    left = end_all(mark)
    assert not left, f"tests have left processes behind, which are ended now: {left}"


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Random tensors are the same on all ranks, unless a test wants it otherwise."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20)


@pytest.fixture(scope="session", params=TRANSPORTS)
def machine(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Generator[Machine, None, None]:
    """Machine of all ranks, once by load and store and once by MPI RMA."""
    from distdl_rma import Machine

    with Machine(comm, segment_size="64MiB", timeout=15, transport=request.param) as machine:
        yield machine


@pytest.fixture(scope="session")
def P_world(comm: MPI.Intracomm) -> Partition:  # noqa: N802
    """Partition of all ranks, as the layer documents make it."""
    from distdl_rma import Machine, MPIPartition

    world = MPIPartition(comm)
    Machine.of(world).segments.waiter.timeout = 15
    return world


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device made of Python, on which copies that nobody has waited for are garbage."""
    from distdl_rma.layers import staging
    from tests.fake_device import NAME, register

    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME})
    return register()


@pytest.fixture
def pinned_matplotlib() -> None:
    """Skip a test where another matplotlib has drawn the pictures of the documentation."""
    import matplotlib as mpl

    constraints = (Path(__file__).parents[1] / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^matplotlib==(.*)$", constraints, re.MULTILINE)
    if mpl.__version__ != pinned:
        pytest.skip(f"pictures were drawn by matplotlib {pinned}, this is {mpl.__version__}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--day",
        type=day,
        metavar="DAY",
        help="tests of a day, such as today, as make test runs them; without it all",
    )
    parser.addoption("--once", action="store_true", help="MPI tests on one of their numbers of ranks a --day")
    parser.addoption("--among", metavar="N,N", help="MPI tests on one of these numbers of ranks a --day")
    parser.addoption("--seldom", action="store_true", help="MPI tests once in 30 days, others once in 10")


def pytest_configure(config: pytest.Config) -> None:
    # Until all is imported, which would make most of the collections.
    gc.disable()
    # As at a time limit from outside: jobs that tests have started are ended on the way out.
    if not config.getoption("--with-mpi"):
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 128 + signal.SIGTERM))
        return
    # Of each rank its own: pytest removes old folders at its end, and ranks that do so at once fail.
    folder = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="pytest-rank-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that is wanted: every rank, and every worker, would import them."""
    needed = NEEDED.get(config.option.markexpr, ())
    mpi = config.getoption("--with-mpi")
    if not (mpi or needed) or collection_path.suffix != ".py":
        return None
    own = collection_path.read_text()
    if mpi and "mark.mpi" not in own:
        return True
    # A folder may mark all of its tests.
    texts = [own, *(file.read_text() for file in collection_path.parent.glob("conftest.py"))]
    marked = any(mark in text for mark in needed for text in texts)
    return True if needed and not marked else None


# After those that are no MPI tests have been taken out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    today, mpi = (config.getoption(name) for name in ("--day", "--with-mpi"))
    # Virtual ranks, if the plugin is loaded.
    size, total = config.getoption("--virtual-ranks", 0), len(items)
    if today is None:
        return
    if mpi:
        from mpi4py import MPI

        size = MPI.COMM_WORLD.size
    chosen = chosen_of_day(config)
    left_out = [item for item in items if not chosen(item, size, today)]
    items[:] = [item for item in items if chosen(item, size, today)]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT] = sum(not size or size in matrix.sizes(item) for item in left_out)
    which = f"MPI tests run on {size} ranks" if size else "tests run"
    config.stash[LEFT_OUT] = f"{len(items)} of {total} {which} on day {today}; DAY= runs all of them"


def chosen_of_day(config: pytest.Config) -> matrix.Chosen:
    """Which tests a day has, by the options."""
    if config.getoption("--seldom"):
        return matrix.runs_seldom
    if among := config.getoption("--among"):
        return matrix.runs_among([*map(int, among.split(","))])
    return matrix.runs_once if config.getoption("--once") else matrix.runs


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    return config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give the next share of the tests to the first worker that is free, the largest one first."""
    from xdist.scheduler import LoadScopeScheduling

    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = share
    return scheduling


def share(nodeid: str) -> str:
    """What a worker gets at a time: a test, or all of a file whose tests share a job."""
    file, _, _ = nodeid.partition("::")
    return file if file in SHARE_A_JOB else nodeid


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGIN] = time.monotonic()
    if session.config.getoption("--with-mpi"):
        from mpi4py import MPI

        session.config.stash[LOCKSTEP] = Lockstep(MPI.COMM_WORLD)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    gc.enable()
    lockstep = session.config.stash.get(LOCKSTEP, None)
    if lockstep is None:
        return
    outcome = Outcome.FAILED if session.testsfailed else Outcome.PASSED
    problem = lockstep.agree("collection", outcome)
    if problem and outcome is Outcome.PASSED:
        pytest.exit(f"collection {problem}", returncode=pytest.ExitCode.INTERRUPTED)
    if not problem:
        checksum = zlib.crc32(" ".join(item.nodeid for item in session.items).encode())
        lockstep.agree(f"start of {len(session.items)} tests, checksum {checksum:x}", outcome)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from in_step(item, "set-up"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from in_step(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from in_step(item, "tear-down"))


def in_step(item: pytest.Item, phase: str) -> Generator[None, object, object]:
    """Run one phase of a test, then make its outcome that of all ranks."""
    lockstep = item.config.stash.get(LOCKSTEP, None)
    if lockstep is None:
        return (yield)
    step = f"{phase} of {item.nodeid}"
    try:
        result = yield
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except pytest.skip.Exception:
        fail_for(lockstep.agree(step, Outcome.SKIPPED))
        raise
    except BaseException as error:
        lockstep.agree(step, Outcome.FAILED, error)
        raise
    fail_for(lockstep.agree(step, Outcome.PASSED))
    return result


def fail_for(problem: str | None) -> None:
    """Fail the test on this rank for what happened on another."""
    if problem:
        pytest.fail(problem, pytrace=False)


def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Under MPI a test that takes too long ends the job: its other ranks wait for this one."""
    lockstep = item.config.stash.get(LOCKSTEP, None)
    if lockstep is None:
        return None
    lockstep.start_timer(item.nodeid, settings.timeout)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    lockstep = item.config.stash.get(LOCKSTEP, None)
    if lockstep is None:
        return None
    lockstep.cancel_timer()
    return True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    note_part(session.config)
    lockstep = session.config.stash.get(LOCKSTEP, None)
    if lockstep is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        lockstep.claim_innocence()


def note_part(config: pytest.Config) -> None:
    """Add to the record of this run what it consisted of: on rank 0, and of workers by their controller."""
    left = config.stash.get(LEFT, 0)
    if hasattr(config, "workerinput"):
        config.workeroutput["left"] = left  # type: ignore[attr-defined]
        return
    size = config.getoption("--virtual-ranks", 0)
    name = (
        f"on {size} virtual ranks"
        if size
        else "slow"
        if config.option.markexpr[:4] == "slow"
        else "without MPI"
    )
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        name = "on 1 rank" if MPI.COMM_WORLD.size == 1 else f"on {MPI.COMM_WORLD.size} ranks"
        if MPI.COMM_WORLD.rank:
            return
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    ran = sum(len(reporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error"))
    record.Part(name, ran, left, time.monotonic() - config.stash[BEGIN]).add()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """Take from a worker how many tests it has left out, the same of each."""
    if error is None:
        node.config.stash[LEFT] = node.workeroutput["left"]


def pytest_collection_finish() -> None:
    leave_out_of_collections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    result = yield
    # A file's tests import more, of torch above all.
    if nextitem is None or nextitem.path != item.path:
        leave_out_of_collections()
    return result


def leave_out_of_collections() -> None:
    """Leave what is there by now out of garbage collections: each would take longer than most tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave together: the first rank to exit with a failure takes the others with it."""
    lockstep = config.stash.get(LOCKSTEP, None)
    if lockstep is not None:
        lockstep.agree("end of the session", Outcome.PASSED)

"""A prediction that is killed anywhere and goes on writes the file of one that was not.

Two kills of each kind, others every day, and a third of the kinds on each day; ``KILLS=20`` makes it twenty.
``mpiexec -n RANKS python -m tests.jobs.out_of_core.test_killed JSON`` makes one attempt.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from distdl_rma import Source, predict
from tests.fake_device import needs_fake_device
from tests.jobs.out_of_core.nets import Gated, UNet, said, seeded
from tests.layers.sources.formats import whole as array
from tests.run_mpi import completed, mpiexec

KILLS = int(os.environ.get("KILLS", "2"))
TODAY = int(time.time()) // 86400
# Some attempts of seconds each.
pytestmark = [pytest.mark.timeout(240 + 120 * KILLS), pytest.mark.slow]
SLABS, SHAPE = 8, (2, 1, 240, 30)
# A kill is before a line of these.
FILES = tuple(
    f"{each}.py"
    for each in (
        "out_of_core/results", "out_of_core/resume_log", "out_of_core/predict", "out_of_core/processes",
        "segments/shared_mailbox", "data/sinks", "sources/raw", "zarr/storage/_local",
    )
)  # fmt: skip


class Killer:
    """Counts the lines that this process executes in ``FILES``, and kills processes before one of them.

    That is the first one for which ``due`` holds, called with whether it is line ``at`` or a later one. There
    are other numbers of lines in each job, since they wait.
    """

    def __init__(self, at, pids, due):
        self.at, self.pids, self.due, self.lines = at, pids, due, 0

    def trace(self, function):
        threading.settrace(function)
        sys.settrace(function)

    def called(self, frame, event, _):
        return self.executed if frame.f_code.co_filename.endswith(FILES) else None

    def executed(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.at and self.due(self.at <= self.lines):
                for pid in self.pids():
                    os.kill(pid, signal.SIGKILL)
        return self.executed


def attempt(folder, out, norm, number, at=0, victim=0, victims="one rank"):
    """One attempt, which is killed before line ``at`` of rank ``victim``; notes what it reads.

    Returns how many lines it has executed.
    """
    from mpi4py import MPI

    folder, comm = Path(folder), MPI.COMM_WORLD
    (folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
    comm.Barrier()

    def pids():
        mine = os.getpid()
        others = (int((folder / f"pid-{each}").read_text()) for each in range(comm.size) if each != comm.rank)
        return [*others, mine] if victims == "all ranks" else [mine]

    def due(reached):
        if number != 1:
            return reached
        # The first attempt is killed, and such that the next one has something to go on with.
        sample, slab = noted(folder, out) or (0, 0)
        return sample > 0 or (reached and (norm != "none" or slab > 0))

    model, x = seeded(lambda: (UNet(2, norm), torch.rand(SHAPE)))
    killer = Killer(at if comm.rank == victim else 0, pids, due)
    with (folder / f"reads-{number}-{comm.rank}").open("w") as reads:

        def read(box):
            reads.write(f"{box[0].start} {box[2].start}\n")
            reads.flush()
            return x[box]

        source = Source(SHAPE, torch.float32, read)
        killer.trace(killer.called)
        predict(model, source, folder / out, grid={"H": SLABS}, comm=comm)
        killer.trace(None)
    return killer.lines


def noted(folder, out):
    """Sample and slab at which the next attempt begins; None where it begins anew."""
    try:
        state = json.loads((folder / f"{out}.progress" / "state.json").read_text())
    except OSError:
        return None
    sample, _, first = state["state"]
    return sample, first


def reads_of(folder, number):
    """Samples and first rows of the slabs that an attempt has read."""
    files = sorted(folder.glob(f"reads-{number}-*"))
    return sorted(tuple(map(int, line.split())) for file in files for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    """Of a norm: what an attempt writes that nobody kills, its lines, and the first row of each slab.

    In this process, and so without the start of a job.
    """

    @functools.cache
    def of(norm):
        folder = tmp_path_factory.mktemp("unkilled")
        lines = attempt(folder, "y.npy", norm, 0)
        return array(folder / "y.npy"), lines, sorted({row for _, row in reads_of(folder, 0)})

    return of


# A job for each kill, and one that ends.
@pytest.mark.parametrize(
    ("ranks", "norm", "victims", "suffix"),
    [
        (1, "none", "all ranks", "zarr"), (1, "none", "all ranks", "npy"), (1, "instance", "all ranks", "h5"),
        (2, "none", "one rank", "h5"), (3, "none", "all ranks", "npy"), (2, "instance", "all ranks", "zarr"),
        (3, "instance", "one rank", "npy"),
    ],
)  # fmt: skip
def test_a_job_goes_on_also_on_other_numbers_of_ranks(tmp_path, unkilled, ranks, norm, victims, suffix):
    pytest.importorskip({"h5": "h5py", "npy": "numpy", "zarr": "zarr"}[suffix])
    draw, out, begins = random.Random(f"{TODAY}, {ranks}, {norm}, {suffix}"), f"y.{suffix}", []

    def tried(number, size, **how):
        begins.append(noted(tmp_path, out))
        arguments = {"folder": str(tmp_path), "out": out, "norm": norm, "number": number, **how}
        program = [sys.executable, "-m", "mpi4py", "-m", "tests.jobs.out_of_core.test_killed"]
        return completed([*mpiexec(size), *program, json.dumps(arguments)], limit=200)

    whole, lines, starts = unkilled(norm)
    assert whole.shape == (SHAPE[0], 3, *SHAPE[2:]) and whole.any() and len(starts) == SLABS
    killed = 0
    for number in range(1, KILLS + 1):
        # The first rank writes, and knows best what was noted.
        victim = 0 if number == 1 else draw.randrange(ranks)
        # Other ranks than the first one have fewer lines, and may be over before.
        at = draw.randint(1, lines // (2 * (victim + 1)))
        if tried(number, ranks, at=at, victim=victim, victims=victims).returncode:
            killed += 1
        else:
            assert np.array_equal(array((tmp_path / out).rename(tmp_path / f"{number}-{out}")), whole)
    assert killed
    done = tried(KILLS + 1, 5 - ranks if ranks > 1 else 1)
    assert done.returncode == 0, done.stderr
    # All files are those of the whole, nothing else is left, and attempts began where the last one was.
    assert np.array_equal(array(tmp_path / out), whole)
    assert not [*tmp_path.glob("*.part"), *tmp_path.glob("*.progress"), *tmp_path.rglob("*.partial")]
    for number, begin in enumerate(begins, 1):
        if begin is not None:
            sample, slab = begin
            reads = reads_of(tmp_path, number)
            assert all((one, starts.index(row)) >= (sample, slab) for one, row in reads), (number, begin)
            assert norm == "none" or slab == 0
    if norm == "none":
        assert any(begin is not None and (*begin,) > (0, 0) for begin in begins)


# Of a process that makes the device known, which this one need not do.
ON_DEVICES = """
import os, signal, sys
from distdl_rma import predict
from distdl_rma.jobs.out_of_core.results import Results
from tests.fake_memory import register
from tests.jobs.out_of_core.nets import Gated, seeded

ended, device, (number, on, source, out) = Results.ended, register(), sys.argv[1:]

def killed(self, sample, slabs):
    ended(self, sample, slabs)
    if slabs == int(number):
        os.kill(os.getpid(), signal.SIGKILL)

Results.ended = killed
predict(seeded(Gated).first.to(on), source, out, grid={"H": 7})
"""


@needs_fake_device
@pytest.mark.parametrize("devices", [("fake", "fake"), ("cpu", "fake")])
def test_a_prediction_goes_on_on_another_device(tmp_path, devices):
    source, out = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(source, np.random.default_rng(0).random((240, 20), np.float32))
    want = predict(seeded(Gated).first, source, grid={"H": 7})
    said(ON_DEVICES, 3, devices[0], source, out, status=-signal.SIGKILL)
    assert noted(tmp_path, "y.npy") == (0, 3) and not out.exists()
    said(ON_DEVICES, 0, devices[1], source, out)
    assert np.array_equal(np.load(out), want) and not [*tmp_path.glob("y.npy.*")]


if __name__ == "__main__":
    attempt(**json.loads(sys.argv[1]))

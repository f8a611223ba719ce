"""A job that is killed while it saves leaves the previous checkpoint or the new one: whole, and never none.

Four jobs a day; ``KILLS=25`` makes it a hundred.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from distdl_rma import load_checkpoint
from tests.run_mpi import completed, launched, mpiexec

pytestmark = pytest.mark.slow

RANKS = 2
KILLS = int(os.environ.get("KILLS", "1"))
SAVES = """
import os, sys
from pathlib import Path
import torch
from mpi4py import MPI
from distdl_rma import Checkpoints, MPIPartition, shard

folder, asynchronous = Path(sys.argv[1]), sys.argv[2] == "asynchronous"
world = MPIPartition(MPI.COMM_WORLD)
rank = MPI.COMM_WORLD.rank
columns = world.create_cartesian_topology_partition((1, world.size))
state = {"whole": torch.zeros(1 << 19), "cut": shard(columns, torch.zeros(400, 333)), "step": 0}
with Checkpoints(folder / "run", keep=2, asynchronous=asynchronous) as kept:
    for step in range(1, 100_000):
        state["whole"].fill_(step)
        state["cut"].to_local().fill_(step)
        state["step"] = step
        kept.save(state, step)
        if step == 1:
            kept.wait()
            (folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
            (folder / f"pid-{rank}.tmp").rename(folder / f"pid-{rank}")
        if rank == 0:
            # A kill may come between opening a file and writing it.
            (folder / "saved.tmp").write_text(str(step))
            (folder / "saved.tmp").rename(folder / "saved")
"""


def found_in(folder: Path) -> int:
    """Step of the checkpoint that is restored; all of its elements are of this step."""
    state = {"whole": torch.zeros(1 << 19), "cut": torch.zeros(400, 333), "step": 0}
    step = load_checkpoint(folder / "run", state)
    assert state["step"] == step
    assert all(bool((state[name] == step).all()) for name in ("whole", "cut"))
    return step


@pytest.mark.parametrize("victims", ["all ranks", "one rank"])
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_leaves_the_previous_or_the_new_checkpoint(tmp_path, kind, victims, number):
    draw = random.Random(f"{kind}, {victims}, {number}, {int(time.time()) // 86400}")
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    pids = [tmp_path / f"pid-{rank}" for rank in range(RANKS)]
    command = [*mpiexec(RANKS), sys.executable, "-m", "mpi4py", str(script), str(tmp_path), kind]
    with (tmp_path / "log").open("wb") as log, launched(command, log, log) as job:
        until = time.time() + 100
        while not all(pid.exists() for pid in pids):
            assert job.poll() is None, (tmp_path / "log").read_text()
            assert time.time() < until
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        numbers = [int(pid.read_text()) for pid in pids]
        for pid in numbers if victims == "all ranks" else [draw.choice(numbers)]:
            os.kill(pid, signal.SIGKILL)
        job.wait(60)
    saved = tmp_path / "saved"
    last = int(saved.read_text()) if saved.exists() else 1
    # An asynchronous one is complete when the call after the next has returned.
    step = found_in(tmp_path)
    assert max(1, last - (2 if kind == "asynchronous" else 0)) <= step <= last + 1


GOES_ON = """
import sys, torch
from distdl_rma import Checkpoints
torch.manual_seed(0)
state = {"x": torch.zeros(10)}
with Checkpoints(sys.argv[1], keep=2) as kept:
    step = kept.restore(state)
    for step in range(step + 1, step + 3):
        state["x"] += 1
        kept.save(state, step)
"""


def test_the_next_job_goes_on_from_there(tmp_path):
    """The leavings of the killed job are in nobody's way."""
    run = tmp_path / "run"
    for ranks, step in ((2, 2), (1, 4), (3, 6)):
        (run / "step-3.tmp").mkdir(parents=True, exist_ok=True)
        said = completed([*mpiexec(ranks), sys.executable, "-m", "mpi4py", "-c", GOES_ON, str(run)])
        assert said.returncode == 0, said.stderr
        state = {"x": torch.zeros(10)}
        assert load_checkpoint(run, state) == step
        assert state["x"].eq(step).all()
        assert sorted(path.name for path in run.iterdir()) == [f"step-{step - 1}", f"step-{step}"]

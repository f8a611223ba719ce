"""A prediction that is killed anywhere and goes on writes the file of one that was not.

Two kills of each kind, others every day, and a third of the kinds on each day; ``KILLS=20`` makes it twenty.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import numpy as np
import pytest

from distdl_rma import open_array
from tests.out_of_core.kills import SHAPE, SLABS, noted, reads_of
from tests.run_mpi import completed, mpiexec

KILLS = int(os.environ.get("KILLS", "2"))
TODAY = int(time.time()) // 86400
# Some attempts of seconds each.
pytestmark = [pytest.mark.timeout(240 + 120 * KILLS), pytest.mark.in_turn(0)]
COMMAND = [sys.executable, "-m", "tests.out_of_core.kills"]


def array(path):
    found = open_array(path)
    return np.asarray(found[tuple(slice(0, n) for n in found.shape)])


def check(folder, out, whole, begins, norm):
    """All files are those of the whole, nothing else is left, and attempts began where the last one was."""
    for path in [folder / out, *folder.glob(f"[0-9]*-{out}")]:
        assert np.array_equal(array(path), whole)
    assert not [*folder.glob("*.part"), *folder.glob("*.progress"), *folder.rglob("*.partial")]
    starts = sorted({row for _, row in reads_of(folder, 0)})
    assert len(starts) == SLABS
    for number, begin in enumerate(begins):
        if begin is not None:
            sample, slab = begin
            reads = reads_of(folder, number)
            assert all((one, starts.index(row)) >= (sample, slab) for one, row in reads), (number, begin)
            assert norm == "none" or slab == 0
    if norm == "none":
        assert any(begin is not None and (*begin,) > (0, 0) for begin in begins)


@pytest.mark.parametrize("suffix", ["npy", "zarr", "h5"])
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_one_process(tmp_path, norm, suffix):
    pytest.importorskip({"h5": "h5py", "npy": "numpy", "zarr": "zarr"}[suffix])
    out = f"y.{suffix}"
    arguments = {"folder": str(tmp_path), "out": out, "norm": norm, "kills": KILLS}
    done = completed([*COMMAND, json.dumps(arguments | {"seed": f"{TODAY}, {norm}, {suffix}"})], limit=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["statuses"][0] == found["statuses"][-1] == 0, done.stderr
    assert -9 in found["statuses"] and {*found["statuses"]} == {0, -9}, done.stderr
    whole = array(tmp_path / f"whole-{out}")
    assert whole.shape == (SHAPE[0], 3, *SHAPE[2:]) and whole.any()
    check(tmp_path, out, whole, found["begins"], norm)


@pytest.mark.parametrize(
    ("ranks", "norm", "victims"),
    [
        (2, "none", "one rank"),
        (3, "none", "all ranks"),
        (2, "instance", "all ranks"),
        (3, "instance", "one rank"),
    ],
)
def test_a_job_goes_on_also_on_other_numbers_of_ranks(tmp_path, ranks, norm, victims):
    draw, out = random.Random(f"{TODAY}, {ranks}, {norm}"), "y.npy"
    begins = []

    def attempt(number, size, **how):
        begins.append(noted(tmp_path, out))
        arguments = {"folder": str(tmp_path), "out": out, "norm": norm, "number": number, **how}
        command = [*mpiexec(size), sys.executable, "-m", "mpi4py", *COMMAND[1:], json.dumps(arguments)]
        return completed(command, limit=200)

    done = attempt(0, ranks)
    assert done.returncode == 0, done.stderr
    (tmp_path / out).rename(tmp_path / f"whole-{out}")
    lines = [int((tmp_path / f"lines-{rank}").read_text()) for rank in range(ranks)]
    killed = 0
    for number in range(1, KILLS + 1):
        # The first rank writes, and knows best what was noted.
        victim = 0 if number == 1 else draw.randrange(ranks)
        at = draw.randint(1, lines[victim] // 2)
        done = attempt(number, ranks, at=at, victim=victim, victims=victims)
        if done.returncode == 0:
            (tmp_path / out).rename(tmp_path / f"{number}-{out}")
        else:
            killed += 1
    assert killed
    done = attempt(KILLS + 1, 5 - ranks)
    assert done.returncode == 0, done.stderr
    check(tmp_path, out, array(tmp_path / f"whole-{out}"), begins, norm)

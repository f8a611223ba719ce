"""Jobs that load, in processes of their own: little memory, files that the user may not read."""

import json
import os
import shutil
import sys

import numpy as np
import pytest

from benchmarks.memory import status_kib
from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow


def ran(tmp_path, script, *arguments, ranks=2, ahead=()):
    """How a script ended on some ranks; it gets the folder, then the arguments."""
    (tmp_path / "script.py").write_text(script)
    program = [sys.executable, "-m", "mpi4py", str(tmp_path / "script.py"), str(tmp_path), *arguments]
    return completed([*ahead, *mpiexec(ranks), *program])


# Blocks are above 32 MiB, so that freed ones go back to the system.
SIDE, SAMPLES = 5120, 6
PEAKS = """
import json, sys, time
from pathlib import Path
from mpi4py import MPI
from benchmarks.memory import status_kib
from distdl_rma import ShardDataset, ShardLoader

def peak(samples, **options):
    loader = ShardLoader(ShardDataset(Path(sys.argv[1]) / "x.npy", grid={"H": -1}, **samples), **options)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    for x in loader:
        # What the thread has read by the time that a step ends.
        time.sleep(0.2)
        x.to_local().sum()
        nbytes = x.to_local().nbytes
        # Else the loop has it until it has the next one.
        del x
    return (status_kib("VmHWM") - before) * 1024 / nbytes

# Loads what is needed of libraries.
peak({"crop": (600, 600)})
peaks = peak({}, prefetch=0), peak({}, prefetch=2), peak({"crop": (5000, 5120)}, prefetch=1)
# Lines of two ranks may be mixed.
if every := MPI.COMM_WORLD.gather(peaks):
    print(json.dumps(every), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_rank_that_loads_needs_little_more_than_its_blocks(tmp_path):
    # A file of holes: it has no blocks on the disk.
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (SAMPLES, 1, SIDE, SIDE)).flush()
    assert status_kib("VmRSS") > 0
    done = ran(tmp_path, PEAKS)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert len(peaks) == 2
    for alone, ahead, cropped in peaks:
        # In blocks: the batch in the loop, and those that the thread has read by then.
        assert 0.9 < alone <= 1.3 and ahead <= 3 * 1.3 and cropped <= 2 * 1.3, peaks


# Root may do all until it gives this up.
WITHOUT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
FORBIDDEN = """
import sys
from pathlib import Path
import torch
from mpi4py import MPI
from distdl_rma import (
    CheckpointError, Checkpoints, DataError, ShardDataset, ShardLoader, create_array, load_checkpoint,
    open_array, shard, write_shards,
)
folder, size = Path(sys.argv[1]), MPI.COMM_WORLD.size
y = shard((size, 1), torch.ones(4, 6))

def written(name):
    with create_array(folder / "locked" / name, (4, 6), like=y) as sink:
        write_shards(sink, y)

def saved():
    with Checkpoints(folder / "locked" / "run") as kept:
        kept.save({"x": y}, 1)

dataset = ShardDataset(folder / "x.npy", grid=(1, size))
calls = [lambda: shard((size, 1), folder / "x.npy"), lambda: ShardLoader(dataset), saved]
calls += [lambda: open_array(folder / "shut" / "x.npy"), lambda: load_checkpoint(folder / "shut" / "run", {})]
calls += [lambda name=name: written(name) for name in ("x.npy", "x.h5", "x.zarr")]
for call in calls:
    try:
        call()
    except (DataError, CheckpointError) as error:
        assert "Permission denied" in str(error) and str(folder) in str(error), error
    else:
        raise SystemExit("no error")
print("eight errors", flush=True)
"""


def test_what_may_not_be_read_or_written_is_an_error_on_all_ranks(tmp_path):
    without = WITHOUT if os.geteuid() == 0 else []
    if without and shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and there is no setpriv (Debian: util-linux)")
    np.save(tmp_path / "x.npy", np.zeros((4, 1, 6)))
    (tmp_path / "x.npy").chmod(0)
    (tmp_path / "locked").mkdir(mode=0o555)
    (tmp_path / "shut").mkdir(mode=0)
    done = ran(tmp_path, FORBIDDEN, ahead=without)
    assert done.returncode == 0 and done.stdout.count("eight errors") == 2, done.stderr

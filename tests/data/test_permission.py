"""Files and folders that the user may not read or write: an error on all ranks, with the file."""

import os
import shutil
import sys

import numpy as np
import pytest

from tests.run_mpi import completed, mpiexec

# Root may do all until it gives this up.
WITHOUT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
SCRIPT = """
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
    done = completed([*without, *mpiexec(2), sys.executable, "-m", "mpi4py", "-c", SCRIPT, str(tmp_path)])
    assert done.returncode == 0 and done.stdout.count("eight errors") == 2, done.stderr

"""A rank that loads needs the memory of its block and of those that it reads ahead, and little more."""

import json
import sys
import textwrap

import numpy as np
import pytest

from benchmarks.memory import status_kib
from tests.run_mpi import completed, mpiexec

# Blocks are above 32 MiB, so that freed ones go back to the system.
SIDE, SAMPLES = 5120, 6
SCRIPT = """
    import json, sys, time
    from pathlib import Path
    from mpi4py import MPI
    from benchmarks.memory import status_kib
    from distdl_rma import ShardDataset, ShardLoader

    def peak(samples, **options):
        dataset = ShardDataset(sys.argv[1], grid={"H": -1}, **samples)
        loader = ShardLoader(dataset, **options)
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
    peak({"crop": (600, 600), "flip": "HW"})
    flipped = {"flip": "HW", "crop": (5000, 5120)}
    peaks = peak({}, prefetch=0), peak({}, prefetch=2), peak(flipped, prefetch=1)
    # Lines of two ranks may be mixed.
    if every := MPI.COMM_WORLD.gather(peaks):
        print(json.dumps(every), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_rank_that_loads_needs_little_more_than_its_blocks(tmp_path):
    # A file of holes: it has no blocks on the disk.
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (SAMPLES, 1, SIDE, SIDE)).flush()
    assert status_kib("VmRSS") > 0
    job = [
        *mpiexec(2),
        sys.executable,
        "-m",
        "mpi4py",
        "-c",
        textwrap.dedent(SCRIPT),
        str(tmp_path / "x.npy"),
    ]
    done = completed(job)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert len(peaks) == 2
    for alone, ahead, flipped in peaks:
        # In blocks: the batch in the loop, and those that the thread has read by then.
        assert 0.9 < alone <= 1.3 and ahead <= 3 * 1.3 and flipped <= 2 * 1.3, peaks

"""Jobs with a ``/dev/shm`` of their own, of any size; needs root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.run_mpi import completed, mpiexec

END = "left in shared memory:"


def run_alone(
    ranks: int, script: str, size: str = "1g", limit: float = 200, **changes: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script on some ranks; how that ended, and the files that it left in shared memory."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("only root can mount a shared memory of its own")
    job = [*mpiexec(ranks), sys.executable, "-m", "mpi4py", "-c", script]
    shell = (
        f"mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 99; {shlex.join(job)}; status=$?;"
        f" echo; echo '{END}'; ls -A /dev/shm; exit $status"
    )
    done = completed(["unshare", "--mount", "sh", "-c", shell], limit, **changes)
    if done.returncode == 99:
        pytest.skip(f"no mount is allowed here: {done.stderr.strip()}")
    return done, done.stdout.partition(END)[2].split()

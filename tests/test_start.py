"""How a machine starts, and refuses to; every case runs in processes of its own."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.run_mpi import default_mpiexec, environment
from tests.test_failures import run

# Without torch, which takes seconds to load.
LIGHT = """
import os, sys
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import DistdlError
comm = MPI.COMM_WORLD
"""
REFUSED = """
try:
    machine = Machine(comm{})
except DistdlError as error:
    sys.stdout.write(f"{{type(error).__name__}}: {{error}}\\n")
else:
    sys.stdout.write(f"reserved {{machine.describe()['segment bytes']}}\\n")
"""


@pytest.fixture
def small_container():
    """Run a script where /dev/shm has 64 MB, as in a container that nobody gave more."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("only root can mount a smaller shared memory")

    def small_container(ranks, body, **changes):
        job = [*shlex.split(default_mpiexec()), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
        mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec " + shlex.join([*job, "-c", LIGHT + body])
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", mount],
            env=environment(**changes),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return small_container


def test_default_segment_in_a_small_container_is_refused_with_both_numbers_and_the_remedy(small_container):
    done = small_container(2, REFUSED.format(""))
    if "mount:" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 2
    for line in told:
        assert line.startswith("SegmentError: not enough shared memory: 67108864 bytes (2 ranks x 33554432)")
        assert "bytes free in /dev/shm" in line
        assert "DISTDL_RMA_SEGMENT_SIZE" in line and "--shm-size" in line


def test_small_container_is_enough_for_who_asks_for_little(small_container):
    done = small_container(2, REFUSED.format(""), DISTDL_RMA_SEGMENT_SIZE="8MiB")
    if "mount:" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr}")
    assert done.stdout.count("reserved 8388608") == 2, done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("transport='pigeon'", "rank 1: transport is one of"),
        ("progress='maybe'", "rank 1: progress is one of"),
        ("timeout='soon'", "rank 1: a timeout is a number of seconds"),
        ("segment_size='2 parsecs'", "rank 1: a segment size is"),
    ],
)
def test_unknown_option_on_one_rank_is_an_error_on_all(argument, message):
    code, out, err = run(
        2, REFUSED.format(f", **(dict({argument}) if comm.rank == 1 else {{}})"), preamble=LIGHT
    )
    assert code == 0, err
    assert out.count("ConfigurationError") == 2 and out.count(message) == 2


@pytest.mark.parametrize("variable", ["DISTDL_RMA_TIMEOUT", "DISTDL_RMA_SEGMENT_SIZE"])
def test_unknown_environment_value_is_an_error(variable):
    code, out, err = run(2, REFUSED.format(""), preamble=LIGHT, **{variable: "plenty"})
    assert code == 0, err
    assert out.count("ConfigurationError: rank 0:") == 2 and "'plenty'" in out


def test_rank_that_does_not_make_the_machine_is_named():
    body = "os.environ['DISTDL_RMA_TIMEOUT'] = '1'\nif comm.rank != 2:\n" + REFUSED.format("").replace(
        "\n", "\n    "
    )
    code, out, err = run(3, body, preamble=LIGHT)
    assert code == 0, err
    assert "ExchangeTimeout: rank 0 waited 1 s for rank 2 to make the machine" in out

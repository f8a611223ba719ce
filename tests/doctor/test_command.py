"""The command as a user runs it; every case is a job of its own."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distdl_rma.__main__ import main
from tests.examples.launching import launcher_is_hydra
from tests.private_memory import run_alone
from tests.run_mpi import completed, environment, mpiexec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "mpi4py", "-m", "distdl_rma", "doctor"]
SMALL = {"DISTDL_RMA_SEGMENT_SIZE": "64MiB"}
LAUNCHERS = "PMI", "OMPI_COMM", "SLURM_STEP", "MPI_LOCALNRANKS"
# The command after something else, with waits of so many seconds.
AFTER = """
import os, sys, time
from distdl_rma.doctor import command
{}
sys.exit(command.doctor(None, {}))
"""
# One of the steps is late on one rank.
LATE = """
from distdl_rma.doctor import measurements
from mpi4py import MPI
carried_out = measurements.convolution
def convolution(*arguments):
    if MPI.COMM_WORLD.rank == {rank}:
        time.sleep(100)
    carried_out(*arguments)
measurements.convolution, command._GRACE_SECONDS = convolution, 5
"""
# Rank 1 cannot load torch, and sends all that it knows while the other loads it.
WITHOUT_TORCH = """
if int(next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)):
    sys.modules["torch"] = None
"""


def alone(**changes):
    """Run the command as a process that no launcher has started."""
    clean = {name: value for name, value in environment().items() if not name.startswith(LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, "-m", "distdl_rma", "doctor"],
        env=clean | SMALL | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """Text and JSON of a job of two ranks that works."""
    file = tmp_path_factory.mktemp("doctor") / "doctor.json"
    done = completed([*mpiexec(2), *DOCTOR, "--json", str(file)], **SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def section():
    return (ROOT / "docs" / "clusters.md").read_text().split("\n## doctor\n")[1].split("\n## ")[0]


def shape(line):
    """Words of a line without its numbers and units."""
    line = line.replace(socket.gethostname(), "node1")
    return re.sub(r"\d[\w.+]*( (us|ms|GB/s|[KMGT]iB)\b)?", "#", line).split()


def test_the_output_of_a_job_that_works_is_that_of_the_file(of_two):
    if not launcher_is_hydra() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the output in the file is of MPICH, on two cores")
    expected, written = (ROOT / "tests" / "doctor" / "report.txt").read_text(), of_two[0]
    assert [*map(shape, written.splitlines())] == [*map(shape, expected.splitlines())]


def test_the_documented_keys_are_those_of_the_json(of_two):
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \|", section(), re.MULTILINE)
    assert sorted(of_two[1]) == sorted(name for row in rows for name in re.findall(r"\w+", row))
    for row in (*of_two[1]["hosts"], *of_two[1]["convolution"]):
        for name in row:
            assert f"`{name}`" in section()


def check(found, ranks):
    assert found["ok"] and found["size"] == ranks and found["nodes"] == [list(range(ranks))]
    assert found["segment_bytes"] == 64 << 20 and found["thread_level"] == "multiple"
    assert set(found["versions"]) == {"distdl_rma", "Python", "torch", "mpi4py", "numpy", "MPI"}
    assert [row["ranks"] for row in found["hosts"]] == [list(range(ranks))]
    for rank, letters in enumerate(found["transports"]):
        assert letters == "s" * rank + "-" + "s" * (ranks - 1 - rank)
    assert len(found["convolution"]) == 4 and all(each["equal"] for each in found["convolution"])
    assert all(finding["level"] == "warning" for finding in found["findings"])


def test_json_has_all_of_a_job_that_works(of_two):
    check(of_two[1], 2)


def test_json_takes_the_place_of_text_on_standard_output():
    done = completed([*mpiexec(3), *DOCTOR, "--json", "-"], **SMALL)
    assert done.returncode == 0
    check(json.loads(done.stdout), 3)


def test_a_process_without_a_launcher_is_examined_alone():
    with alone() as process:
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "1 rank on 1 node; launcher: none" in said
    assert "warning: the job has 1 rank" in said and "equal to rounding" in said


def test_two_processes_that_are_both_rank_0_of_1_are_one_report_and_an_error():
    other = "OMPI_COMM_WORLD" if launcher_is_hydra() else "PMI"
    started = [alone(**{f"{other}_SIZE": "2", f"{other}_RANK": str(rank)}) for rank in range(2)]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [1, 0] and said[1] == ""
    assert "error: every process is rank 0 of 1" in said[0] and "mpiexec" in said[0]


def test_more_threads_than_cores_are_a_warning():
    cores = len(os.sched_getaffinity(0))
    done = completed([*mpiexec(2), *DOCTOR], **SMALL | {"OMP_NUM_THREADS": str(cores)})
    assert done.returncode == 0
    assert f"have {2 * cores} threads of torch on {cores} cores" in done.stdout or cores == 1
    assert f"set OMP_NUM_THREADS={cores // 2}" in done.stdout or cores == 1


def test_an_invalid_option_is_an_error_of_all_ranks_and_ends_cleanly():
    done = completed([*mpiexec(2), *DOCTOR], DISTDL_RMA_SEGMENT_SIZE="plenty")
    assert done.returncode == 1
    assert (
        "error: ranks 0-1 could not make a machine: ConfigurationError: rank 0: DISTDL_RMA_SEGMENT_SIZE"
        in done.stdout
    )
    assert "TERMINATION" not in done.stdout


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e9"])
def test_a_timeout_that_nobody_can_wait_for_is_an_invalid_option(capsys, timeout):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--timeout", timeout])
    assert f"a wait takes from 0 to 86400 seconds, not {timeout}" in capsys.readouterr().err


def test_a_small_container_is_an_error_with_the_remedy():
    script = (
        "import runpy, sys; sys.argv[1:] = ['doctor']; runpy.run_module('distdl_rma', run_name='__main__')"
    )
    done, _ = run_alone(2, script, size="64m")
    assert done.returncode == 1
    assert "error: /dev/shm of " in done.stdout and "--shm-size=8g" in done.stdout


@pytest.mark.parametrize(
    ("rank", "text"),
    [(0, "rank 0 could not convolve on a node: TimeoutError"), (1, "rank 1 could not send the results")],
)
def test_a_rank_that_hangs_is_named_and_the_job_ends(rank, text):
    program = AFTER.format(LATE.format(rank=rank), 2.0)
    done = completed([*mpiexec(3), sys.executable, "-m", "mpi4py", "-c", program], 100, **SMALL)
    assert done.returncode != 0
    assert f"error: {text}" in done.stdout


def other_mpi(folder, code):
    """The path of Python, with an mpi4py.MPI of this code in front."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").touch()
    (folder / "mpi4py/MPI.py").write_text(code)
    return f"{folder}:{ROOT}"


def test_an_mpi_that_cannot_be_loaded_is_an_error(tmp_path):
    path = other_mpi(tmp_path, "raise RuntimeError('cannot load MPI library')")
    with alone(PYTHONPATH=path) as process:
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "error: rank 0 could not start MPI: RuntimeError: cannot load MPI library" in said
    assert "distdl_rma[mpich]" in said


def test_a_rank_that_cannot_load_torch_is_a_finding():
    program = AFTER.format(WITHOUT_TORCH, 5.0)
    done = completed([*mpiexec(2), sys.executable, "-m", "mpi4py", "-c", program], **SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: rank 1 could not load torch: ModuleNotFoundError" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_mpi_that_does_not_start_is_an_error(tmp_path):
    # As MPI does, it keeps other threads from running.
    path = other_mpi(tmp_path, "import ctypes; ctypes.PyDLL(None).sleep(100)")
    program = AFTER.format("command._GRACE_SECONDS = command._LAST_SECONDS = 1", 1.0)
    done = completed([sys.executable, "-c", program], 90, PYTHONPATH=path)
    assert done.returncode == 1
    assert "error: rank 0 could not start MPI: TimeoutError" in done.stdout and not done.stderr


HELP = """
import contextlib, runpy, sys
for arguments in ([], ["--help"], ["doctor", "--help"]):
    sys.argv[1:] = arguments
    with contextlib.suppress(SystemExit):
        runpy.run_module("distdl_rma", run_name="__main__")
    print("loaded:", sorted({"mpi4py", "torch"} & set(sys.modules)))
"""


def test_help_loads_neither_mpi_nor_torch():
    done = completed([sys.executable, "-c", HELP])
    *told, rest = done.stdout.split("loaded: []\n")
    assert done.returncode == 0 and not rest and len(told) == 3 and all("doctor" in each for each in told)

"""What a user is told of how the job was started; every case runs in processes of its own."""

import os
import subprocess
import sys

import pytest

from tests.run_mpi import completed, mpiexec
from tests.test_failures import LIGHT, run

pytestmark = pytest.mark.slow

MODEL = """
from distdl_rma import distribute, print0
import torch
print0("before any machine")
for _ in range(2):
    distribute(torch.nn.Conv2d(1, 1, 3), {"H": -1})(torch.ones(1, 1, 9, 9))
"""
LAUNCHERS = "PMI", "OMPI_COMM", "SLURM_STEP"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "1 rank, nothing is split; several are started by mpiexec -n"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "a launcher started 4: launcher and mpi4py are of different MPIs"),
    ],
)
def test_a_job_of_one_rank_says_so_where_no_launcher_of_its_mpi_wants_one(told, message):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    command, env = [sys.executable, "-c", LIGHT + MODEL], clean | {"DISTDL_RMA_SEGMENT_SIZE": "32MiB"} | told
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.count("RuntimeWarning: distribute:") == done.stderr.count(message) == 1


def test_more_threads_than_cores_are_one_warning_with_the_number_to_set():
    threads = len(os.sched_getaffinity(0)) + 1
    code, out, err = run(2, MODEL, preamble=LIGHT, OMP_NUM_THREADS=str(threads))
    assert code == 0 and out.splitlines() == ["before any machine"], err
    assert err.count("RuntimeWarning: distribute: 2 ranks of") == err.count("OMP_NUM_THREADS=") == 1


def test_a_worker_of_a_data_loader_is_no_rank_and_a_script_without_a_main_is_told_so(tmp_path):
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from distdl_rma import distribute, print0
def main():
    model = distribute(torch.nn.Conv2d(1, 1, 3), {"H": -1})
    data = TensorDataset(torch.ones(2, 1, 8, 8))
    for (x,) in DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn"):
        print0(tuple(model(x).shape))
"""
    done = []
    for start in ("if __name__ == '__main__':\n    main()\n", "main()\n"):
        (tmp_path / "script.py").write_text(script + start)
        command = [*mpiexec(2), sys.executable, "-m", "mpi4py", str(tmp_path / "script.py")]
        done.append(completed(command, OMP_NUM_THREADS="1"))
    good, bad = done
    assert good.returncode == 0 and good.stdout == "(2, 1, 6, 6)\n", good.stderr
    assert bad.returncode and "put all that is no import, function or class under if __name__" in bad.stderr
    assert "PMI" not in bad.stderr


def test_one_thread_per_rank_and_a_launched_rank_alone_say_nothing():
    for ranks in (1, 2):
        code, _, err = run(ranks, MODEL, preamble=LIGHT, OMP_NUM_THREADS="1")
        assert code == 0 and "Warning" not in err

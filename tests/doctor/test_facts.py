"""Facts of a process, from its environment and its control group."""

import pytest

from distdl_rma.doctor.facts import HYDRA, OPEN_MPI, PMI, SLURM, Launcher, memory_limit

SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, Launcher()),
        ({"SLURM_NTASKS": "4"}, Launcher()),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"} | SLURM_STEP, Launcher(OPEN_MPI, 4, 1)),
        ({"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "2"} | SLURM_STEP, Launcher(HYDRA, 8, 5)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "9"} | SLURM_STEP, Launcher(SLURM, 4, 3)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, Launcher(PMI, 4, 3)),
        ({"PMI_SIZE": "many"}, Launcher()),
    ],
)
def test_a_launcher_is_known_by_its_variables_and_one_within_a_job_of_slurm_comes_first(
    environment, launcher
):
    assert Launcher.seen(environment) == launcher


@pytest.mark.parametrize(
    ("members", "file"),
    [("0::/job/step\n", "job/memory.max"), ("7:memory:/job\n1:cpu:/", "memory/job/memory.limit_in_bytes")],
)
def test_the_limit_of_memory_is_the_least_of_the_control_groups(tmp_path, members, file):
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "memory/job").mkdir(parents=True)
    whole = memory_limit(tmp_path, members)
    (tmp_path / file).write_text("1048576\n")
    assert memory_limit(tmp_path, members) == 1 << 20 < whole

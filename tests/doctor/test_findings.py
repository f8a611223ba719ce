"""What is found wrong with facts, and what to do."""

from dataclasses import replace

import pytest

from distdl_rma.doctor.facts import OPEN_MPI, SLURM, Compared, Failure, Launcher
from distdl_rma.doctor.findings import findings
from tests.doctor.cases import GIB, VERSIONS, job, rank


def only(job):
    (finding,) = findings(job)
    return finding


def test_a_job_without_fault_has_no_finding():
    assert findings(job()) == []


@pytest.mark.parametrize(
    ("launcher", "mpi", "text", "remedy"),
    [
        (
            OPEN_MPI,
            "MPICH Version: 5.0.2",
            "uses another MPI, 'MPICH Version: 5.0.2'",
            "by the mpiexec of the MPI",
        ),
        (SLURM, "MPICH Version: 5.0.2", "though Slurm (srun) started 4", "srun --mpi=pmi2"),
        (SLURM, "Open MPI v5.0.8", "though Slurm (srun) started 4", "srun --mpi=pmix"),
    ],
)
def test_processes_that_are_all_rank_0_of_1_are_an_error(launcher, mpi, text, remedy):
    alone = job(1, launcher=Launcher(launcher, 4, 0), versions=VERSIONS | {"MPI": mpi})
    finding = only(alone)
    assert finding.level == "error"
    assert "every process is rank 0 of 1" in finding.text and text in finding.text
    assert remedy in finding.remedy


def test_a_launcher_of_another_mpi_is_an_error_with_one_rank_too():
    finding = only(job(1, launcher=Launcher(OPEN_MPI, 1, 0)))
    assert (finding.level, finding.text) == (
        "error",
        "Open MPI (mpiexec) started the job, but mpi4py uses 'MPICH Version: 5.0.2'",
    )


def test_one_rank_without_a_launcher_is_a_warning():
    finding = only(job(1, launcher=Launcher()))
    assert finding.level == "warning" and "1 rank" in finding.text and "mpiexec -n 2" in finding.remedy


def test_ranks_that_fail_alike_are_one_error_and_those_that_follow_none():
    broken = job(4)
    broken.failures = [
        Failure(0, "make a machine", "PeerFailedError: rank 2 failed: SegmentError: no room"),
        Failure(2, "make a machine", "SegmentError: no room"),
        Failure(3, "make a machine", "SegmentError: no room"),
    ]
    finding = only(broken)
    assert finding.level == "error"
    assert finding.text == "ranks 2-3 could not make a machine: SegmentError: no room"


def test_versions_that_differ_are_an_error_that_names_the_ranks():
    mixed = job(3)
    mixed.ranks[1] = replace(mixed.ranks[1], versions=VERSIONS | {"torch": "2.8.0"})
    finding = only(mixed)
    assert finding.level == "error"
    assert finding.text == "torch differs: 2.9.0 on ranks 0, 2, 2.8.0 on rank 1"


def test_little_shared_memory_is_an_error_only_where_no_machine_can_be_made():
    small = job(shm_total=64 << 20)
    small.segment_bytes = 8 << 20
    assert only(small).level == "warning"
    small.segment_bytes = 0
    finding = only(small)
    assert finding.level == "error"
    assert finding.text == "/dev/shm of node1: 64 MiB for 2 ranks are too little for most models"
    assert "--shm-size" in finding.remedy and "DISTDL_RMA_SEGMENT_SIZE" in finding.remedy


def test_segments_above_the_limit_of_memory_are_a_warning():
    finding = only(job(memory_limit=6 * GIB))
    assert finding.level == "warning" and "may grow to 8 GiB; its limit of memory is 6 GiB" in finding.text


@pytest.mark.parametrize(
    ("changes", "text", "remedy"),
    [
        ({"cores": (0,), "threads": 1}, "2 ranks of node1 share 1 core", "bind ranks to other cores"),
        ({"threads": 5}, "2 ranks of node1 have 10 threads of torch on 8 cores", "OMP_NUM_THREADS=4"),
    ],
)
def test_more_ranks_or_threads_than_cores_are_a_warning(changes, text, remedy):
    finding = only(job(**changes))
    assert (finding.level, finding.text) == ("warning", text)
    assert remedy in finding.remedy


def test_threads_beyond_the_cores_of_a_bound_rank_are_a_warning():
    bound = job()
    bound.ranks = [rank(0, cores=(0,), threads=2), rank(1, cores=(1, 2, 3), threads=2)]
    finding = only(bound)
    assert finding.level == "warning" and finding.text.startswith("rank 0 of node1: more threads")


def test_a_low_thread_level_matters_between_nodes_only():
    several = job(thread_level="serialized")
    assert findings(several) == []
    several.ranks[1] = replace(several.ranks[1], host="node2")
    several.nodes = [[0], [1]]
    finding = only(several)
    assert finding.level == "warning" and "thread level of MPI is 'serialized'" in finding.text


def test_ranks_of_a_host_without_common_memory_are_a_warning():
    apart = job(3)
    apart.nodes = [[0, 1], [2]]
    finding = only(apart)
    assert finding.level == "warning"
    assert finding.text == "the ranks of node1 do not share memory: 0-1 | 2"


def test_python_without_mpi4py_is_a_warning_where_there_are_others():
    assert "ranks 0-1: python runs without -m mpi4py" in only(job(ends_job=False)).text
    assert findings(job(1, ends_job=False, launcher=Launcher("Slurm (srun)", 1, 0)))[0].text.startswith(
        "the job has"
    )


def test_a_convolution_that_differs_is_an_error_with_the_difference():
    wrong = job()
    wrong.compared = [Compared("output", 1e-7, 1.0, True), Compared("gradient of the input", 0.5, 2.0, False)]
    finding = only(wrong)
    assert finding.level == "error"
    assert finding.text == "split convolution: the gradient of the input differs by 5.0e-01 of 2.0e+00"


def test_errors_come_first():
    both = job(ends_job=False)
    both.failures = [Failure(0, "allreduce", "OSError: no")]
    assert [finding.level for finding in findings(both)] == ["error", "warning"]

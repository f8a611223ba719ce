"""What is found wrong with facts, and what to do."""

from dataclasses import replace

import pytest

from distdl_rma.doctor.facts import OPEN_MPI, SLURM, Compared, Failure, Launcher
from distdl_rma.doctor.findings import findings
from tests.doctor.cases import GIB, VERSIONS, job, rank, with_cards

WITHOUT = (
    "python runs without -m mpi4py, so that an exception on one rank may leave the others waiting in MPI"
)
MPICH, NO_ROOM, RANK_0 = VERSIONS["MPI"], "SegmentError: no room", "every process is rank 0 of 1"


def alone(launcher, mpi=MPICH, started=4):
    """A process that knows of no other, though a launcher started several."""
    return job(1, launcher=Launcher(launcher, started, 0), versions=VERSIONS | {"MPI": mpi})


def but(job, rank=None, changes=None, **facts):
    """The job with other facts, and other ones of a rank."""
    for name, value in facts.items():
        setattr(job, name, value)
    if rank is not None:
        job.ranks[rank] = replace(job.ranks[rank], **changes)
    return job


# A job, and of its finding the level, the text and words of the remedy.
FOUND = {
    "mixed MPIs": (
        alone(OPEN_MPI), "error",
        f"{RANK_0}, though Open MPI (mpiexec) started 4: mpi4py uses another MPI, {MPICH!r}",
        "by the mpiexec"),
    "srun without PMI-2": (
        alone(SLURM), "error", f"{RANK_0}, though Slurm (srun) started 4", "srun --mpi=pmi2"),
    "srun without PMIx": (
        alone(SLURM, "Open MPI v5.0.8"), "error", f"{RANK_0}, though Slurm (srun) started 4",
        "srun --mpi=pmix"),
    "mixed MPIs of one rank": (
        alone(OPEN_MPI, started=1), "error",
        f"Open MPI (mpiexec) started the job, but mpi4py uses {MPICH!r}", "by the mpiexec"),
    "one rank": (
        job(1, launcher=Launcher()), "warning", "the job has 1 rank: nothing between ranks was tried",
        "mpiexec -n 2"),
    "one rank without mpi4py as the main program": (
        job(1, ends_job=False, launcher=Launcher(SLURM, 1, 0)), "warning",
        "the job has 1 rank: nothing between ranks was tried", "mpiexec -n 2"),
    # Ranks that fail alike are one, and those that follow none.
    "failures": (
        but(job(4), failures=[Failure(0, "make a machine", f"PeerFailedError: rank 2 failed: {NO_ROOM}"),
                              *(Failure(rank, "make a machine", NO_ROOM) for rank in (2, 3))]), "error",
        f"ranks 2-3 could not make a machine: {NO_ROOM}", "options and environment variables"),
    "versions": (
        but(job(3), 1, {"versions": VERSIONS | {"torch": "2.8.0"}}), "error",
        "torch differs: 2.9.0 on ranks 0, 2, 2.8.0 on rank 1", "the same environment"),
    "little shared memory": (
        but(job(shm_total=64 << 20), segment_bytes=8 << 20), "warning",
        "/dev/shm of node1: 64.0 MiB for 2 ranks are too little for most models", "--shm-size"),
    "too little for a machine": (
        but(job(shm_total=64 << 20), segment_bytes=0), "error",
        "/dev/shm of node1: 64.0 MiB for 2 ranks are too little for most models", "DISTDL_RMA_SEGMENT_SIZE"),
    "limit of memory": (
        job(memory_limit=6 * GIB), "warning",
        "segments of node1 may grow to 8.0 GiB; its limit is 6.0 GiB", "DISTDL_RMA_SEGMENT_SIZE"),
    "ranks on a core": (
        job(cores=(0,), threads=1), "warning", "2 ranks of node1 share 1 core", "bind ranks to other cores"),
    "threads": (
        job(threads=5), "warning", "2 ranks of node1 have 10 threads of torch on 8 cores",
        "OMP_NUM_THREADS=4"),
    "threads of a bound rank": (
        but(job(), ranks=[rank(0, cores=(0,), threads=2), rank(1, cores=(1, 2, 3), threads=2)]), "warning",
        "rank 0 of node1: more threads of torch than cores that the rank is bound to", "--cpus-per-task"),
    "thread level between nodes": (
        but(job(thread_level="serialized"), 1, {"host": "node2"}, nodes=[[0], [1]]), "warning",
        "the thread level of MPI is 'serialized': data travels between nodes only while ranks wait for it",
        "MPI_THREAD_MULTIPLE"),
    "two ranks on a card": (
        with_cards(({}, 2), ({}, 2)), "warning",
        "one card for ranks 0-1 of node1: cuda:LOCAL_RANK is card 0", "set LOCAL_RANK"),
    "two ranks on a card by its name": (
        with_cards(({"CUDA_VISIBLE_DEVICES": "3,1"}, 2),
                   ({"CUDA_VISIBLE_DEVICES": "1,3", "LOCAL_RANK": "1"}, 2)),
        "warning", "one card for ranks 0-1 of node1: cuda:LOCAL_RANK is card 3", "show each rank one card"),
    "a rank without a card": (
        with_cards(({}, 1), ({"CUDA_VISIBLE_DEVICES": ""}, 0)), "warning",
        "no card for rank 1 of node1: there is no cuda:LOCAL_RANK", "see all cards"),
    "a rank that sees too few cards": (
        with_cards(({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0"}, 1),
                   ({"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "1"}, 1)), "warning",
        "no card for rank 1 of node1: there is no cuda:LOCAL_RANK", "leave LOCAL_RANK out"),
    "no common memory": (
        but(job(3), nodes=[[0, 1], [2]]), "warning", "the ranks of node1 do not share memory: 0-1 | 2",
        "--ipc=host"),
    "without mpi4py as the main program": (
        job(ends_job=False), "warning", f"ranks 0-1: {WITHOUT}", "python -m mpi4py script.py"),
    "convolution": (
        but(job(), compared=[Compared("output", 1e-7, 1.0, True), Compared("bias", 0.5, 2.0, False)]),
        "error", "split convolution: the bias differs by 5.0e-01 of 2.0e+00", "report the difference"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_one_finding_with_a_remedy(name):
    wrong, *expected, remedy = FOUND[name]
    (finding,) = findings(wrong)
    assert [finding.level, finding.text] == expected and remedy in finding.remedy


CARDS = with_cards(({"LOCAL_RANK": "0"}, 2), ({"CUDA_VISIBLE_DEVICES": "1"}, 1))


@pytest.mark.parametrize(
    "job", [job(), job(thread_level="serialized"), CARDS], ids=["usual", "on one node", "a card each"]
)
def test_a_job_without_fault_has_no_finding(job):
    assert findings(job) == []


def test_errors_come_first():
    both = but(job(ends_job=False), failures=[Failure(0, "allreduce", "OSError: no")])
    assert [finding.level for finding in findings(both)] == ["error", "warning"]

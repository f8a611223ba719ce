"""What is wrong with a job, and what to do: pure functions of its facts.

A finding is an error if the job cannot work as it is, and a warning if it works, but slowly or not for long.
Each has a remedy that the user can carry out; a symptom without one is not reported. Each function looks for
one kind of fault, and says nothing where facts are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from distdl_rma.doctor.facts import HYDRA, OPEN_MPI, SHARED_MEMORY, SLURM, Job, counted, least
from distdl_rma.geometry.partition import by_key, spans
from distdl_rma.trace import size_text

_SMALL_SHARED_MEMORY = 64 << 20
_DOCTOR = "distdl_rma doctor"
_INSTALL = "docs/clusters.md, section Install"
_CONTAINERS = "docs/clusters.md, section Shared memory in containers"
_SEGMENT = "set DISTDL_RMA_SEGMENT_SIZE to less"
_REMEDIES = {
    "load torch": "install torch, its CPU build is enough",
    "start MPI": "pip install 'distdl_rma[mpich]' has an MPI; on a cluster build mpi4py against its MPI:"
    f" {_INSTALL}",
    "make a machine": "docs/clusters.md has the options and environment variables of a machine",
    "send the facts": "look at what the launcher prints, and whether these processes still run",
    "convolve between nodes": "try a program of MPI alone on these nodes, and other networks of its MPI"
    " (UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER, OMPI_MCA_btl)",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do; an ``"error"`` or a ``"warning"``."""

    level: str
    text: str
    remedy: str


_error, _warning = partial(Finding, "error"), partial(Finding, "warning")


def findings(job: Job) -> list[Finding]:
    """All findings of a job, errors first."""
    found = [finding for check in _CHECKS for finding in check(job)]
    return sorted(found, key=lambda finding: finding.level != "error")


def of_launcher(job: Job) -> Iterator[Finding]:
    """A launcher of another MPI than mpi4py's, ranks that do not know each other, a job of one rank.

    An MPI does not understand the variables of another one's launcher, so each process is a job of its own,
    runs to its end, and does all the work: a fault that no error tells of.
    """
    for facts in job.ranks[:1]:
        launcher, mpi = facts.launcher, facts.versions.get("MPI", "")
        open_mpi = "Open MPI" in mpi
        mixed = (launcher.name == OPEN_MPI and not open_mpi) or (launcher.name == HYDRA and open_mpi)
        remedy = f"start the job by the mpiexec of the MPI of mpi4py, {mpi!r}"
        if launcher.name == SLURM:
            remedy = f"try srun --mpi={'pmix' if open_mpi else 'pmi2'} (of srun --mpi=list), or mpiexec"
        if not mpi:
            continue
        if launcher.ranks > 1 and facts.size == 1:
            yield _error(
                f"every process is rank 0 of 1, though {launcher.name} started {launcher.ranks}"
                + (f": mpi4py uses another MPI, {mpi!r}" if mixed else ""),
                remedy,
            )
        elif mixed:
            yield _error(f"{launcher.name} started the job, but mpi4py uses {mpi!r}", remedy)
        elif facts.size == 1:
            yield _warning(
                "the job has 1 rank: nothing between ranks was tried", f"run mpiexec -n 2 {_DOCTOR}"
            )


def of_failures(job: Job) -> Iterator[Finding]:
    """Steps that failed. That other ranks failed because of one is no finding of its own.

    Equal messages of several ranks are one finding, with all their numbers.
    """
    first = [each for each in job.failures if not each.message.startswith("PeerFailedError")]
    for (step, message), alike in by_key(first or job.failures, attrgetter("step", "message")).items():
        remedy = _REMEDIES.get(step, "docs/failures.md says what the error means")
        yield _error(f"{_named([each.rank for each in alike])} could not {step}: {message}", remedy)


def of_versions(job: Job) -> Iterator[Finding]:
    """Ranks with different versions.

    An error, since ranks with different versions may choose different plans for the same tensors.
    """
    for name in sorted({name for facts in job.ranks for name in facts.versions}):
        seen = {facts.rank: facts.versions.get(name, "none") for facts in job.ranks}
        ranks = by_key(seen, seen.__getitem__)
        if len(ranks) > 1:
            each = ", ".join(f"{version} on {_named(some)}" for version, some in ranks.items())
            yield _error(
                f"{name} differs: {each}", "start all ranks with the same environment, on a shared disk"
            )


def of_memory(job: Job) -> Iterator[Finding]:
    """Shared memory, and the limit of the control group, against what segments may take.

    64 MiB is the size that containers have by default. Without segments, as where no machine could be made,
    a small one is the likely reason and so an error. A limit is compared with what segments may grow to: they
    take pages when touched, and the kernel kills a process that goes beyond.
    """
    for host, ranks in job.hosts.items():
        total = least(facts.shm_total for facts in ranks)
        limit = least(facts.memory_limit for facts in ranks)
        wanted = job.segment_bytes * len(ranks)
        if total is not None and (total <= _SMALL_SHARED_MEMORY or total < wanted):
            short = f"{size_text(total)} for {counted(len(ranks), 'rank')} are too little for most models"
            yield Finding(
                "warning" if job.segment_bytes else "error",
                f"{SHARED_MEMORY} of {host}: {short}",
                f"start a container with --shm-size=8g or --ipc=host ({_CONTAINERS}), or {_SEGMENT}",
            )
        if limit is not None and limit < wanted:
            yield _warning(
                f"segments of {host} may grow to {size_text(wanted)}; its limit is {size_text(limit)}",
                f"{_SEGMENT}, or ask the batch system for more memory",
            )


def of_cores(job: Job) -> Iterator[Finding]:
    """More ranks, or threads, than cores.

    One finding for a host: with more ranks than cores, the threads of each are no news.
    """
    for host, ranks in job.hosts.items():
        cores = len({core for facts in ranks for core in facts.cores})
        threads = sum(facts.threads for facts in ranks)
        bound = [facts.rank for facts in ranks if facts.threads > len(facts.cores)]
        if len(ranks) > cores:
            yield _warning(
                f"{counted(len(ranks), 'rank')} of {host} share {counted(cores, 'core')}",
                "start one rank per core at most, or have the launcher bind ranks to other cores",
            )
        elif threads > cores:
            yield _warning(
                f"{counted(len(ranks), 'rank')} of {host} have {counted(threads, 'thread')} of torch on"
                f" {counted(cores, 'core')}",
                f"set OMP_NUM_THREADS={max(1, cores // len(ranks))} before Python starts",
            )
        elif bound:
            yield _warning(
                f"{_named(bound)} of {host}: more threads of torch than cores that the rank is bound to",
                "set OMP_NUM_THREADS to the cores of a rank, or have the launcher bind it to more"
                " (mpiexec --bind-to none, srun --cpus-per-task)",
            )


def of_cards(job: Job) -> Iterator[Finding]:
    """Ranks of a host with one card, and ranks without a card while others have one.

    Two ranks on a card are no error: they compute in turn, and share its memory.
    """
    remedy = (
        "set LOCAL_RANK for each rank to its number on the node, and have each see all cards of the node, or"
        " show each rank one card and leave LOCAL_RANK out (docs/devices.md)"
    )
    for host, ranks in job.hosts.items() if any(facts.cards["count"] for facts in job.ranks) else ():
        for card, alike in by_key(ranks, lambda facts: facts.cards["own"]).items():
            those = f"{_named([facts.rank for facts in alike])} of {host}"
            if not card:
                yield _warning(f"no card for {those}: there is no cuda:LOCAL_RANK", remedy)
            elif len(alike) > 1:
                yield _warning(f"one card for {those}: cuda:LOCAL_RANK is card {card}", remedy)


def of_nodes(job: Job) -> Iterator[Finding]:
    """Ranks of one host that share no memory, and no thread for what travels between nodes.

    Ranks in separate containers of a host reach each other by MPI only, as if they were on two nodes.
    """
    for host, ranks in job.hosts.items():
        mine = {facts.rank for facts in ranks}
        parts = [node for node in job.nodes if mine.intersection(node)]
        if len(parts) > 1:
            yield _warning(
                f"the ranks of {host} do not share memory: {' | '.join(spans(part) for part in parts)}",
                "start all ranks of a host in one container, or containers with --ipc=host",
            )
    level = min((facts.thread_level for facts in job.ranks if facts.thread_level != "multiple"), default="")
    if len(job.nodes) > 1 and level:
        yield _warning(
            f"the thread level of MPI is {level!r}: data travels between nodes only while ranks wait for it",
            "use an MPI with MPI_THREAD_MULTIPLE, and do not set mpi4py.rc.thread_level",
        )


def of_start(job: Job) -> Iterator[Finding]:
    """Ranks whose exception would leave the others waiting.

    The library's own waits notice it; those of MPI, as in a call of mpi4py, do not.
    """
    if ranks := [facts.rank for facts in job.ranks if facts.size > 1 and not facts.ends_job]:
        yield _warning(
            f"{_named(ranks)}: python runs without -m mpi4py, so that an exception on one rank may leave the"
            " others waiting in MPI",
            "start programs by python -m mpi4py script.py",
        )


def of_convolution(job: Job) -> Iterator[Finding]:
    """A split convolution that is not torch's."""
    for each in job.compared:
        if not each.equal:
            yield _error(
                f"split convolution: the {each.name} differs by {each.error:.1e} of {each.scale:.1e}",
                "run the tests of the library on this machine, and report the difference",
            )


_CHECKS = (
    of_launcher, of_failures, of_versions, of_memory, of_cores, of_cards, of_nodes, of_start, of_convolution,
)  # fmt: skip


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"

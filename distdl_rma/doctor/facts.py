"""Facts about a job, as plain data: what each rank sees of its process and node, what was measured.

This file loads neither MPI nor torch, and nothing of this package that does: facts are also wanted of a
process in which MPI does not start. Facts of MPI are those of the module if somebody has loaded it.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

from distdl_rma import __version__
from distdl_rma.geometry.partition import by_key

HYDRA, OPEN_MPI, SLURM, PMI = "Hydra (mpiexec of MPICH)", "Open MPI (mpiexec)", "Slurm (srun)", "PMI"
SHARED_MEMORY = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
# How a launcher is recognised, and where it says how many processes it started and which one this is. Hydra
# within a job of Slurm comes before Slurm.
_LAUNCHERS = (
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (HYDRA, "MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK"),
    (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    (PMI, "PMI_SIZE", "PMI_SIZE", "PMI_RANK"),
)


@dataclass(frozen=True)
class Launcher:
    """What started this process, how many processes it started, and which of them this is."""

    name: str = "none"
    ranks: int = 0
    rank: int = 0

    @classmethod
    def seen(cls, environment: Mapping[str, str]) -> Launcher:
        """Launcher that the environment variables tell of.

        MPI's own answer is no help: a process whose MPI is not that of the launcher is rank 0 of 1.
        """
        for name, sign, ranks, rank in _LAUNCHERS:
            if sign in environment and environment.get(ranks, "").isdecimal():
                mine = environment.get(rank, "")
                return cls(name, int(environment[ranks]), int(mine) if mine.isdecimal() else 0)
        return cls()


@dataclass(frozen=True)
class RankFacts:
    """What a rank sees of its process and of its node.

    ``cores`` are those that it may use, ``threads`` those of torch, 0 without torch; sizes are in bytes, None
    where there is no shared memory or no limit. ``ends_job`` says whether ``python -m mpi4py`` runs it.
    ``cards`` are those of :func:`cards_seen`.
    """

    rank: int
    size: int
    host: str
    launcher: Launcher
    versions: Mapping[str, str]
    thread_level: str
    cores: tuple[int, ...]
    threads: int
    shm_free: int | None
    shm_total: int | None
    memory_limit: int | None
    ends_job: bool
    cards: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A step of the examination that a rank could not take, and the error."""

    rank: int
    step: str
    message: str


@dataclass(frozen=True)
class Compared:
    """A tensor of the split convolution against torch's on the whole input."""

    name: str
    error: float
    scale: float
    equal: bool


@dataclass
class Job:
    """What is known of a job on its first rank; empty or 0 where it is not known.

    ``nodes`` are ranks by node. ``transports`` has for each rank a text with a letter for each peer: ``s``
    shared memory of the node, ``r`` MPI's puts, ``-`` the rank itself.
    """

    ranks: list[RankFacts] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    segment_bytes: int = 0
    transports: dict[int, str] = field(default_factory=dict)
    compared: list[Compared] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        """Facts of ranks by host."""
        return by_key(self.ranks, attrgetter("host"))


def rank_facts(launcher: Launcher) -> RankFacts:
    """Facts of this process; local. Those of torch and of MPI only where these are loaded."""
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    versions = {"distdl_rma": __version__, "Python": platform.python_version()}
    for package in ("torch", "mpi4py", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    level, place = "", (launcher.rank, 1)
    if mpi is not None:
        first = mpi.Get_library_version().splitlines()[0].rstrip("\0")
        versions["MPI"] = " ".join(first.partition(",")[0].split())
        levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        level = next(each.lower() for each in levels if mpi.Query_thread() == getattr(mpi, f"THREAD_{each}"))
        place = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return RankFacts(
        *place,
        host=socket.gethostname(),
        launcher=launcher,
        versions=versions,
        thread_level=level,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=0 if torch is None else torch.get_num_threads(),
        shm_free=None if shared is None else shared.free,
        shm_total=None if shared is None else shared.total,
        memory_limit=memory_limit(),
        ends_job=any(word.removeprefix("-m") in ("mpi4py", "mpi4py.run") for word in sys.orig_argv),
        cards=cards_seen(os.environ, 0 if torch is None else torch.cuda.device_count()),
    )


def cards_seen(environment: Mapping[str, str], count: int) -> dict[str, Any]:
    """GPUs that a rank sees, of which CUDA shows ``count``, and which of them ``cuda:LOCAL_RANK`` is.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``, their names on the node; ``own`` is the name of the rank's one,
    empty if it sees no card of this number.
    """
    local, visible = environment.get("LOCAL_RANK", ""), environment.get("CUDA_VISIBLE_DEVICES", "")
    at = int(local) if local.isdecimal() else 0
    names = visible.split(",") if visible else [*map(str, range(count))]
    return {"count": count, "local_rank": at, "visible": visible, "own": names[at] if at < count else ""}


def memory_limit(groups: Path = _CGROUPS, members: str | None = None) -> int | None:
    """Bytes that this process and its control group may use, at most the memory of the node; local.

    Batch systems and containers limit a job by control groups, of which the node's own figures say nothing.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if members is None:
        with suppress(OSError):
            members = Path("/proc/self/cgroup").read_text()
    for line in (members or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            # Version 2, or 1. A group is bound by the limits of those that it is in.
            folder = groups / controllers / path.lstrip("/")
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):
                    limits.append(int((each / file).read_text()))
    return min((limit for limit in limits if limit > 0), default=None)


def least(numbers: Iterable[int | None]) -> int | None:
    """Smallest of the numbers that are known; None if none is."""
    return min((number for number in numbers if number is not None), default=None)


def counted(number: int, noun: str) -> str:
    """Number and noun, in the plural where it is due."""
    return f"{number} {noun}{'s' if number != 1 else ''}"

"""How torch makes groups: on the machine of this job, without an address.

torch's ranks usually learn of each other by an address and a port in the environment. MPI's ranks know each
other already, so ``init_process_group("rma")`` needs neither::

    rendezvous   torch asks for a store, rank and size      of MPI; the store is a port of rank 0
    create       torch asks for a group of some ranks       on the machine of all ranks of the job

torch needs the store for things of its own, such as numbers of sub-groups; this backend does not use it.

This file stands apart from ``registration.py`` since it imports torch and MPI: a program that only imports
the package pays for neither.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from distdl_rma.errors import ConfigurationError, UnsupportedError
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine, launched
from distdl_rma.segments.virtual_ranks.comm import virtual_rank
from distdl_rma.torch_backend.group import RmaProcessGroup

_HOW = (
    "start the ranks by MPI, as in 'mpiexec -n 4 python -m mpi4py train.py', or in a job of Slurm 'srun"
    " --mpi=pmi2 python -m mpi4py train.py' (MPICH) or '--mpi=pmix' (Open MPI)"
)
# Of Linux: the address of a network's interface.
_ASK_ADDRESS = 0x8915
_ANSWER_SECONDS = 3.0
_THIS_HOST = "127.0.0.1"
_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

Handler = Callable[..., Iterator[tuple[Store, int, int]]]
# Machines of groups of some ranks, where there is none of all; kept for the next group of these.
_machines: dict[tuple[int, ...], Machine] = {}


def create(options: Any) -> RmaProcessGroup:
    """The process group that torch asks for; collective over its ranks, blocking.

    ``ConfigurationError`` if the ranks were not started by MPI, or torch numbers them in another way.
    """
    if virtual_rank() is not None:
        raise UnsupportedError(
            "init_process_group('rma'): virtual ranks would share torch's groups of a process"
        )
    rank, size = launched()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if not options.global_ranks_in_group and options.group_size != size:
        started = f"{options.group_size} rank(s) are asked for, but MPI started {size}"
        raise ConfigurationError(f"init_process_group('rma'): {started}: {_HOW}")
    if ranks[options.group_rank] != rank:
        raise ConfigurationError(
            f"init_process_group('rma'): rank {ranks[options.group_rank]} of torch is rank {rank} of MPI;"
            " leave out rank and world_size, and the environment variables RANK and WORLD_SIZE"
        )
    asked = options.timeout
    timeout = None if asked in (None, default_pg_timeout) else asked.total_seconds()
    name = str(options.group_id or "default")
    return RmaProcessGroup(_machine_of(ranks, size).segments, ranks, name, timeout)


def _machine_of(ranks: tuple[int, ...], size: int) -> Machine:
    everyone = Machine.known()
    if everyone is not None or len(ranks) == size:
        return everyone or Machine.on()
    # Ranks outside the group make no call.
    machine = _machines.get(ranks)
    if machine is None or machine.closed:
        _machines[ranks] = machine = Machine(ranks=ranks)
    return machine


def rendezvous(
    by_environment: Handler, url: str, timeout: timedelta = default_pg_timeout, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Rendezvous for ``env://``, torch's default; needs no environment variables if MPI started the ranks.

    If all of torch's variables are set, or if MPI did not start the ranks, it is torch's own rendezvous.
    """
    # One process alone, without any launcher, is a job of one rank.
    others = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    by_mpi = launched()[1] > 1 or others <= 1
    if "?" in url or all(os.environ.get(name) for name in _NEEDED) or not by_mpi:
        try:
            yield from by_environment(url, timeout=timeout, **options)
        except ValueError as error:
            if not by_mpi:
                error.add_note(f"Without MPI the ranks know nothing of each other. For 'rma' {_HOW}.")
            raise
        return
    yield _store(timeout), *launched()
    raise RuntimeError("the ranks that MPI started stay what they are: no second rendezvous")


def _store(timeout: timedelta) -> Store:
    """Store of torch that all ranks reach; collective over them.

    Rank 0 listens, and each rank takes the first of its addresses that answers: a host may have a network
    that others do not reach. On one node this is the address of the host itself, which needs no network and
    no host name: containers may not have these.
    """
    segments = Machine.on().segments
    rank, size = launched()
    store, words = None, None
    if rank == 0:
        store = TCPStore(_THIS_HOST, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        near = [_THIS_HOST] if len(segments.segment.nodes) == 1 else []
        words = [store.port, near + _addresses()]
    port, addresses = gather_words(segments, words, "rendezvous of torch")[0]
    if store is not None:
        return store
    return TCPStore(
        _reached(addresses, port), port, size, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _addresses() -> list[str]:
    """Addresses of this host, one for each network, and its name, which other hosts may not resolve."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        for _, name in socket.if_nameindex():
            # An interface without an address is left out.
            with suppress(OSError):
                answer = fcntl.ioctl(some.fileno(), _ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [*(address for address in found if not address.startswith("127.")), socket.gethostname()]


def _reached(addresses: list[str], port: int) -> str:
    """First address that accepts a connection from here."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), _ANSWER_SECONDS):
            return address
    raise ConfigurationError(
        f"init_process_group('rma'): the host of rank 0 answers at none of {addresses}, port {port}; set"
        f" {', '.join(_NEEDED)} for torch's own rendezvous"
    )

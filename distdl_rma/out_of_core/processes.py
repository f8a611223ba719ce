"""Processes that predict together: each plays every n-th virtual rank, and messages travel between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from mpi4py import MPI

from distdl_rma.checks.outcome import together
from distdl_rma.dtypes import flat_bytes
from distdl_rma.errors import PeerFailedError
from distdl_rma.machine import Machine
from distdl_rma.segments.buffered_channel import Address, Mailbox, Message, VectorKey
from distdl_rma.segments.channel import Array
from distdl_rma.segments.transport.virtual_ranks import world

_MOST_NBYTES = 1 << 30
_IDLE_SECONDS = 1e-4


class Processes:
    """The processes of a communicator, COMM_WORLD if None; the ``first`` one writes the results.

    All methods are collective, but for ``plays``.
    """

    def __init__(self, comm: MPI.Intracomm | None) -> None:
        self._comm = world(comm)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.first = self.rank == 0
        self._machine = Machine.on(self._comm) if self.size > 1 else None

    def plays(self, rank: int) -> bool:
        """Whether a virtual rank is one of this process. Neighbours are on different ones, so all compute."""
        return rank % self.size == self.rank

    def together(self) -> AbstractContextManager[dict[str, Any]]:
        """Context whose error on one process is raised on all; they have equal facts."""
        if self._machine is None:
            return nullcontext({})
        advice = "all ranks make the same call"
        return together(self._machine, self._machine.ranks, "predict", advice=advice)

    def of_first(self, value: Any) -> Any:
        """The value of the first process."""
        return self._comm.bcast(value)

    def share(self, result: torch.Tensor) -> None:
        """Copy the tensor of the first process to the others."""
        memory = flat_bytes(result).numpy()
        for begin in range(0, len(memory) if self.size > 1 else 0, _MOST_NBYTES):
            self._comm.Bcast(memory[begin : begin + _MOST_NBYTES])

    @contextmanager
    def connected(self, mailbox: Mailbox, **actions: Callable[..., Any]) -> Iterator[Mailbox]:
        """Context with the mailbox of all processes, ``mailbox`` itself if there is one process.

        Its ``tell`` calls the ``actions`` on the first process. The context ends when all messages have been
        received; an error of one process ends the waits of all.
        """
        if self.size == 1:
            mailbox.actions |= actions
            yield mailbox
            return
        shared = SharedMailbox(self._comm.Dup(), actions)
        error: Exception | None = None
        try:
            yield shared
        except Exception as raised:  # noqa: BLE001 - all processes raise it
            error = raised
        shared.finish(error)
        with self.together():
            # Those that have waited for the one which failed have nothing to say.
            if error is not None and not isinstance(error, PeerFailedError):
                raise error


class SharedMailbox(Mailbox):
    """The mailbox of several processes: what goes to ranks of another one is sent there.

    No process waits for another one but in the waits of its ranks, which ``poll``, and in ``finish``.
    """

    def __init__(self, comm: MPI.Intracomm, actions: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._comm: Any = comm
        self._rank, self._size = comm.rank, comm.size
        self._others = [each for each in range(comm.size) if each != comm.rank]
        self._sends: list[MPI.Request] = []
        # The process that has failed.
        self._failed: int | None = None
        self.actions = actions
        self._received: dict[str, Callable[..., Any]] = {
            "put": super().put,
            "add": super().add,
            "want": super().want,
            "fail": self._fail,
            **actions,
        }

    def put(self, address: Address, message: Message) -> None:
        """Store a message where its receiver is."""
        process = address.receiver % self._size
        if process == self._rank:
            super().put(address, message)
        else:
            self._send(process, "put", address, message)

    def add(self, key: VectorKey, rank: int, vector: Array) -> None:
        """Store the vector of a rank on all processes."""
        super().add(key, rank, vector)
        for process in self._others:
            self._send(process, "add", key, rank, vector)

    def want(self, rank: int) -> None:
        """Note that a rank is waited for, on all processes."""
        if rank > self.wanted:
            super().want(rank)
            for process in self._others:
                self._send(process, "want", rank)

    def poll(self) -> None:
        """Receive what has come; ``PeerFailedError`` if another process has failed."""
        self._sends = [each for each in self._sends if not each.Test()]
        while (found := self._comm.improbe()) is not None:
            action, *arguments = found.recv()
            if self._failed is None:
                self._received[action](*arguments)
        if self._failed is not None:
            raise PeerFailedError(f"predict: rank {self._failed} has failed", self._failed, "an error there")

    def tell(self, action: str, *arguments: Any) -> None:
        """Call an action on the first process."""
        if self._rank == 0:
            self.actions[action](*arguments)
        else:
            self._send(0, action, *arguments)

    def finish(self, error: Exception | None) -> None:
        """Receive until all processes have called this, and all messages have arrived; blocking."""
        if error is not None and self._failed is None:
            self._fail(self._rank)
            for process in self._others:
                self._send(process, "fail", self._rank)
        over: MPI.Request | None = None
        while over is None or not over.Test():
            with suppress(PeerFailedError):
                self.poll()
            if over is None and not self._sends:
                over = self._comm.Ibarrier()
            time.sleep(_IDLE_SECONDS)
        self._comm.Free()

    def _fail(self, process: int) -> None:
        self._failed = process

    def _send(self, process: int, *message: Any) -> None:
        self._sends.append(self._comm.issend(message, process))

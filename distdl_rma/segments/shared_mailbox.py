"""The mailbox of virtual ranks of several processes, between which its messages travel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.buffered_channel import Address, Mailbox, Message, VectorKey
from distdl_rma.segments.channel import Array

_IDLE_SECONDS = 1e-4
# Bytes of messages that others have not received, at most; one larger message may be under way alone.
_UNDER_WAY_NBYTES = 1 << 24


def process_of(rank: int, size: int) -> int:
    """The process of a virtual rank, of ``size`` processes. Neighbours are on different ones: all compute."""
    return rank % size


class SharedMailbox(Mailbox):
    """The mailbox of several processes: what goes to ranks of another one is sent there.

    The first process has the ``actions``, and learns of a message for ``keep`` before its sender has ended.
    No process waits for another one but in the waits of its ranks, which ``poll``, and in ``finish``.
    """

    def __init__(self, comm: MPI.Intracomm, first: int, actions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(first, actions)
        self._comm: Any = comm
        self._rank, self._size = comm.rank, comm.size
        self._others = [each for each in range(comm.size) if each != comm.rank]
        # With the bytes of each.
        self._sends: list[tuple[MPI.Request, int]] = []
        # The process that has failed.
        self._failed: int | None = None
        self._received: dict[str, Callable[..., Any]] = {
            "put": self._arrived,
            "add": super().add,
            "want": super().want,
            "fail": self._fail,
            **actions,
        }

    def put(self, address: Address, message: Message) -> None:
        """Store a message where its receiver is."""
        process = process_of(address.receiver, self._size)
        # The first process learns of a message for itself when it arrives.
        if self._rank == 0 or process != 0:
            self.keep(address, message)
        if process == self._rank:
            self.store(address, message)
        else:
            self._send(process, "put", address, message, nbytes=message.nbytes)

    def _arrived(self, address: Address, message: Message) -> None:
        if self._rank == 0:
            self.keep(address, message)
        self.store(address, message)

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
        self._sends = [each for each in self._sends if not each[0].Test()]
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
            self._send(0, action, *arguments, nbytes=sum(getattr(each, "nbytes", 0) for each in arguments))

    def finish(self, error: Exception | None) -> bool:
        """Receive until all processes have called this, and all messages have arrived; blocking.

        Returns whether this process has an ``error`` of its own, which was not due to that of another one.
        """
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
        return error is not None and self._failed == self._rank

    def _fail(self, process: int) -> None:
        if self._failed is None:
            self._failed = process

    def _send(self, process: int, *message: Any, nbytes: int = 0) -> None:
        while (waiting := sum(each for _, each in self._sends)) and waiting + nbytes > _UNDER_WAY_NBYTES:
            # Others receive where they wait, and when their slab has ended.
            self.poll()
            time.sleep(_IDLE_SECONDS)
        self._sends.append((self._comm.issend(message, process), nbytes))

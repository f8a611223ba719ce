"""Mailbox of virtual ranks of several processes, which sends messages between them.

Two processes with six virtual ranks, each of which sends to later ranks only::

    process 0   ranks 0    2    4         first process: also keeps messages for a restart, and results
                      |  /^ |  /^
    process 1   ranks 1     3     5       neighbours are on different processes: both compute

A process receives only when its ranks poll: in their waits, after each slab, and while it cannot send more.
If none of them polled while it sends, two processes with full queues would wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.channel import Array
from distdl_rma.segments.mailbox import Address, Mailbox, Message, VectorKey
from distdl_rma.segments.transport.links import Transfers

_IDLE_SECONDS, _CHECK_SECONDS = 1e-4, 0.1
# Most bytes of messages that others have not received; a larger message may be under way alone.
_UNDER_WAY_NBYTES = 1 << 24


def process_of(rank: int, size: int) -> int:
    """Process of a virtual rank, out of ``size``. Neighbours are on different ones, so that all compute."""
    return rank % size


class SharedMailbox(Mailbox):
    """Mailbox of several processes: messages to ranks of another process are sent there.

    The first process has the ``actions``. Before a sender ends, its messages are passed to the action
    ``keep`` there. Processes wait for each other in the waits of their ranks, which ``poll``, in ``finish``,
    and while too many bytes are under way. Meanwhile ``check`` is called ten times a second, which raises
    ``PeerFailedError`` if a process is gone: that error is ``lost`` then.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        first: int,
        actions: dict[str, Callable[..., Any]],
        check: Callable[[], object],
    ) -> None:
        super().__init__(first, actions)
        self._check, self._checked = check, time.monotonic()
        self.lost: PeerFailedError | None = None
        self._comm: Any = comm
        self._rank, self._size = comm.rank, comm.size
        self._others = [each for each in range(comm.size) if each != comm.rank]
        # Pending sends, with their bytes.
        self._sends = Transfers()
        # The first process that is known to have failed.
        self._failed: int | None = None
        self._received: dict[str, Callable[..., Any]] = {
            "put": self._arrived,
            "add": super().add,
            "want": super().want,
            "fail": self._fail,
            **actions,
        }

    def put(self, address: Address, message: Message) -> None:
        """Store a message in the process of its receiver."""
        process = process_of(address.receiver, self._size)
        # The first process keeps a message to itself when the message arrives.
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
        """Record in all processes that another rank waits for ``rank``."""
        if rank > self.wanted:
            super().want(rank)
            for process in self._others:
                self._send(process, "want", rank)

    def poll(self) -> None:
        """Receive what has arrived; ``PeerFailedError`` if another process has failed, or is gone."""
        self._sends.under_way()
        while (found := self._comm.improbe()) is not None:
            action, *arguments = found.recv()
            if self._failed is None:
                self._received[action](*arguments)
        if self.lost is None and time.monotonic() - self._checked > _CHECK_SECONDS:
            self._checked = time.monotonic()
            try:
                self._check()
            except PeerFailedError as error:
                self.lost = error
        if self.lost is not None:
            raise self.lost
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

        Ends as well when a process is gone. Returns whether this process has an ``error`` that is not due to
        the failure of another process.
        """
        if error is not None and self._failed is None and self.lost is None:
            self._fail(self._rank)
            for process in self._others:
                self._send(process, "fail", self._rank)
        over: MPI.Request | None = None
        while over is None or not over.Test():
            with suppress(PeerFailedError):
                self.poll()
            if self.lost is not None:
                return False
            if over is None and not self._sends:
                over = self._comm.Ibarrier()
            time.sleep(_IDLE_SECONDS)
        self._comm.Free()
        return error is not None and self._failed == self._rank

    def _fail(self, process: int) -> None:
        if self._failed is None:
            self._failed = process

    def _send(self, process: int, *message: Any, nbytes: int = 0) -> None:
        # A message without bytes, as of a failure, does not wait.
        while nbytes and (waiting := sum(self._sends.kept)) and waiting + nbytes > _UNDER_WAY_NBYTES:
            # Other processes receive while they wait, and after each slab.
            self.poll()
            time.sleep(_IDLE_SECONDS)
        self._sends.add(self._comm.issend(message, process), nbytes)

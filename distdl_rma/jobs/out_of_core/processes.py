"""Processes that predict together: each plays every n-th virtual rank, and messages travel between them.

Two processes, six slabs. Every process has a thread for each virtual rank, but computes only its own::

    process 0    [ 0 ]      [ 2 ]      [ 4 ]              -> time
                      v    ^     v    ^     v             messages for the next slab
    process 1         [ 1 ]      [ 3 ]      [ 5 ]

Neighbours are on different processes, so that one computes while the other waits for its messages.

An error of one process ends the waits of all. They meet then, and all raise that error, except where a
process is gone: nobody can meet it, and the others raise ``PeerFailedError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from distdl_rma.layers.dtypes import flat_bytes
from distdl_rma.segments.consensus import together
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.mailbox import Address, Mailbox, Message
from distdl_rma.segments.shared_mailbox import SharedMailbox, process_of
from distdl_rma.segments.virtual_ranks.comm import world
from distdl_rma.segments.waiting.header import WaitReason

_MOST_NBYTES = 1 << 30


class Processes:
    """The processes of a communicator, COMM_WORLD if None; the ``first`` one notes what is written.

    They are on so many ``hosts``. All methods are collective, but for ``plays``.
    """

    def __init__(self, comm: Any) -> None:
        self._comm: Any = world(comm)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.first = self.rank == 0
        self._machine = Machine.on(self._comm) if self.size > 1 else None
        nodes = ((0,),) if self._machine is None else self._machine.segments.segment.nodes
        self.hosts = len(nodes)
        #: Which one of the processes of its host this is.
        self.place = next(node.index(self.rank) for node in nodes if self.rank in node)

    def plays(self, rank: int) -> bool:
        """Whether a virtual rank is one of this process."""
        return process_of(rank, self.size) == self.rank

    def together(self) -> AbstractContextManager[dict[str, Any]]:
        """Context whose error on one process is raised on all; they have equal facts."""
        if self._machine is None:
            return nullcontext({})
        advice = "all ranks make the same call"
        return together(self._machine, self._machine.ranks, "predict", advice=advice)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Context that the others learn of if it ends by no ``Exception``, such as ``KeyboardInterrupt``."""
        try:
            yield
        except BaseException as error:
            if self._machine is not None and not isinstance(error, Exception):
                self._machine.fail(error)
            raise

    def gathered(self, call: Callable[[], Any]) -> list[Any]:
        """What ``call`` returns on each process; an error of one is raised on all."""
        with self.together():
            mine = call()
        return [mine] if self.size == 1 else list(self._comm.allgather(mine))

    def share(self, result: torch.Tensor) -> None:
        """Copy the tensor of the first process to the others."""
        memory = flat_bytes(result).numpy()
        for begin in range(0, len(memory) if self.size > 1 else 0, _MOST_NBYTES):
            self._comm.Bcast(memory[begin : begin + _MOST_NBYTES])

    @contextmanager
    def connected(
        self, first: int, messages: Iterable[tuple[Address, Message]], actions: dict[str, Callable[..., Any]]
    ) -> Iterator[Mailbox]:
        """Context with the mailbox of all processes, with ``messages`` of ranks before ``first``.

        Its ``tell`` calls the ``actions`` on the first process. The context ends when all messages have been
        received; an error of one process ends the waits of all.
        """
        machine, shared, mailbox = self._machine, None, Mailbox(first, actions)
        if machine is not None:
            check = partial(_look_at_others, machine)
            mailbox = shared = SharedMailbox(self._comm.Dup(), first, actions, check)
        for address, message in messages:
            if self.plays(address.receiver):
                mailbox.store(address, message)
        if machine is None or shared is None:
            yield mailbox
            return
        error: Exception | None = None
        try:
            yield shared
        except Exception as raised:  # noqa: BLE001 - all processes raise it
            error = raised
        own = shared.finish(error)
        machine.segments.watch.end_wait()
        if shared.lost is not None:
            raise error or shared.lost
        with self.together():
            # Processes that have waited for the one which failed get its error.
            if error is not None and own:
                raise error


def _look_at_others(machine: Machine) -> None:
    # Raises if a process has failed, has left or is gone.
    machine.segments.waiter.advance_quietly()
    machine.segments.watch.look(WaitReason(machine.segments.watch.others, "to predict with this one"))

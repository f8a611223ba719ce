"""All-reduces in few Python calls: views and functions are made once, and small ones need no script.

A training loop reduces the same tensors in each step. So views of their memory, bound functions and the cut
into parts are kept by address, length, type and operation, and a call has few things left to do::

    is the memory known?                  no: the usual way, which then teaches it (``learn``)
    is a collective under way?            yes: the usual way, which waits in line
    copy to the slot, announce, look      about ten calls of Python, if the others come at the same time
    are the others late?                  what is left of the call becomes an operation of the queue

An address is only a key: memory is read and written during a call whose tensor has it, or by a script that
keeps this tensor. Freed memory that another tensor gets is thus that of the new tensor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.collectives.reduction import Array, Reduction
from distdl_rma.torch_backend.calls import Call
from distdl_rma.torch_backend.node_slots import WHOLE_BYTES, NodeSlots
from distdl_rma.torch_backend.on_node import NodeCollectives
from distdl_rma.torch_backend.operations import OperationQueue, PendingCall

# Looks at the others' words before the rank queues a script, and before it yields the core: another process
# may keep the core for milliseconds. Where ranks share cores, it yields after each look.
_LOOKS, _CROWDED_LOOKS, _SPINS = 1500, 100, 1000
_KEPT = 512


class Quick(NamedTuple):
    """Prepared calls on one tensor's memory.

    Small calls have this rank's slot and the reduction for even and odd rounds; others have a ``script``.
    """

    call: Call
    data: memoryview
    mine: tuple[memoryview, ...]
    reduce: tuple[Callable[[], object], ...]
    script: Callable[[], Script] | None


class QuickReductions:
    """All-reduces of contiguous tensors on one node, while no other collective is under way."""

    def __init__(self, rounds: NodeSlots, queue: OperationQueue, way: NodeCollectives) -> None:
        self._rounds, self._queue, self._collectives = rounds, queue, way
        self._lock = rounds.manager.segment.lock
        self._most = min(WHOLE_BYTES, rounds.slot_bytes)
        # For asynchronous calls, and for those that wait.
        self._patience = range(1), range(_CROWDED_LOOKS if rounds.crowded else _LOOKS)
        # Ranks that share a core yield it at once.
        self._spins = 0 if rounds.crowded else _SPINS
        # By address, number of elements, type and operation; used only while a tensor has that memory.
        self._known: dict[Hashable, Quick] = {}

    def learn(self, tensor: torch.Tensor, op: Hashable, call: Call, reducer: Reduction) -> None:
        """Prepare calls on this memory."""
        count = tensor.numel()
        if not count or tensor.is_complex():
            return
        if len(self._known) >= _KEPT:
            self._known.clear()
        memory = memoryview((ctypes.c_char * (count * tensor.itemsize)).from_address(tensor.data_ptr()))
        x = np.frombuffer(memory, reducer.element.storage)
        if x.nbytes <= self._most:
            quick = self._whole(call, x, reducer)
        else:
            quick = Quick(call, memory, (), (), self._collectives.shares(x, reducer))
        self._known[tensor.data_ptr(), count, tensor.dtype, op] = quick

    def _whole(self, call: Call, x: Array, reducer: Reduction) -> Quick:
        me, slots = self._rounds.me, self._rounds.slots(reducer.element.storage)
        rows = [[slot[: x.size] for slot in some] for some in slots]
        mine = tuple(some[me].data.cast("B") for some in rows)
        for some in rows:
            some[me] = x
        return Quick(call, x.data.cast("B"), mine, tuple(reducer.bound(some, x) for some in rows), None)

    def run(self, tensor: torch.Tensor, op: Hashable, hurry: bool) -> PendingCall | bool | None:
        """Reduce a contiguous tensor in place.

        Returns True if it is done, False if it cannot begin now, None if its memory is not prepared, or else
        the operation that completes it.
        """
        quick = self._known.get((tensor.data_ptr(), tensor.numel(), tensor.dtype, op))
        if quick is None:
            return None
        rounds, queue = self._rounds, self._queue
        with self._lock:
            if not (queue.ready and rounds.free(rounds.number + 1)):
                return False
            rounds.call = quick.call
            try:
                rest = (self._at_once if quick.script is None else self._by_script)(quick, hurry)
            except BaseException as error:
                queue.break_off(error)
                raise
            if rest is None:
                return True

            def script() -> Script:
                yield from rest
                # Keeps the tensor, whose memory the script uses.
                tensor.numel()

            return queue.append(PendingCall(script, rounds.waiting, None))

    def _at_once(self, quick: Quick, hurry: bool) -> Script | None:
        rounds = self._rounds
        rounds.number = number = rounds.number + 1
        quick.mine[number & 1][:] = quick.data
        rounds.announce(number, True)
        shown = rounds.all_shown
        for look in self._patience[hurry]:
            if shown(number):
                quick.reduce[number & 1]()
                rounds.read(number)
                return None
            if look >= self._spins:
                os.sched_yield()

        def rest() -> Script:
            yield from rounds.seen(number)
            quick.reduce[number & 1]()
            rounds.read(number)

        return rest()

    def _by_script(self, quick: Quick, hurry: bool) -> Script | None:
        script: Iterator[None] = quick.script()  # type: ignore[misc]
        rounds, looks, number = self._rounds, 0, 0
        patience = len(self._patience[hurry])
        while looks < patience:
            for _ in script:
                break
            else:
                return None
            looks = looks + 1 if rounds.number == number else 0
            number = rounds.number
            if looks > self._spins:
                os.sched_yield()
        return script

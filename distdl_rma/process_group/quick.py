"""All-reduces in as few steps as can be: nothing is looked up twice, and small ones need no script."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.process_group.collectives.reducers import Reducer
from distdl_rma.process_group.collectives.rounds import WHOLE_BYTES, Call, Rounds
from distdl_rma.process_group.operations import Lines, Operation, Script

Array = NDArray[Any]

# How a vector is reduced of which every rank takes a share.
Shares = Callable[[Array, Reducer], Script]
# Looks at the others' words before the wait becomes a patient one, and before others may have the core.
_LOOKS, _SPINS = 500, 60
_KEPT = 512


class Quick(NamedTuple):
    """A kind of calls: their words, and for even and odd rounds this rank's slot and everyone's.

    No slots are kept for vectors that everyone reduces a share of.
    """

    call: Call
    reducer: Reducer
    mine: tuple[Array, ...]
    rows: tuple[list[Array], ...]


class QuickReductions:
    """Carries out all-reduces of contiguous tensors on one node, where no other collective is under way."""

    def __init__(self, rounds: Rounds, lines: Lines, shares: Shares) -> None:
        self._rounds, self._lines, self._shares = rounds, lines, shares
        self._lock = rounds.manager.segment.lock
        self._most = min(WHOLE_BYTES, rounds.slot_bytes)
        self._patience = range(_LOOKS if rounds.manager.waiter.spins else 1), range(1)
        # By type, number of elements and operation.
        self._known: dict[Hashable, Quick] = {}
        # By address and kind: never used without a tensor that has its memory there.
        self._arrays: dict[Hashable, Array] = {}

    def known(self, tensor: torch.Tensor, op: Any) -> Quick | None:
        """What is known of calls of this kind."""
        return self._known.get((tensor.dtype, tensor.numel(), op))

    def learn(self, tensor: torch.Tensor, op: Any, call: Call, reducer: Reducer) -> None:
        """Keep what calls of this kind need, if they are small enough."""
        count = tensor.numel()
        if not count:
            return
        if len(self._known) >= _KEPT:
            self._known.clear()
        slots = self._rounds.views(reducer.storage).shown if count * tensor.itemsize <= self._most else []
        rows = tuple([slot[k][:count] for slot in slots] for k in range(2))
        mine = tuple(some[self._rounds.me] for some in rows if some)
        self._known[tensor.dtype, count, op] = Quick(call, reducer, mine, rows)

    def run(self, quick: Quick, tensor: torch.Tensor, hurry: bool) -> Operation | bool:
        """Reduce in place; True if that is over, False if it cannot begin now, or what remains of it."""
        x, rounds = self._array(tensor, quick.reducer), self._rounds
        with self._lock:
            if not (self._lines.ready and rounds.free(rounds.number + 1)):
                return False
            rounds.call = quick.call
            try:
                rest = (self._whole if quick.mine else self._in_shares)(quick, x, hurry)
            except BaseException as error:
                self._lines.break_off(error)
                raise
            if rest is None:
                return True

            def script() -> Script:
                yield from rest
                # Until here its memory is used.
                tensor.numel()

            return self._lines.append(Operation(script, rounds.waiting, None))

    def _whole(self, quick: Quick, x: Array, hurry: bool) -> Script | None:
        rounds = self._rounds
        rounds.number = number = rounds.number + 1
        rows = quick.rows[number & 1]
        quick.mine[number & 1][...] = x
        rounds.announce(number, True)
        for look in self._patience[not hurry]:
            if rounds.all_shown(number):
                quick.reducer.reduce(rows, x)
                rounds.read(number)
                return None
            if look > _SPINS:
                os.sched_yield()

        def rest() -> Script:
            yield from rounds.seen(number)
            quick.reducer.reduce(rows, x)
            rounds.read(number)

        return rest()

    def _in_shares(self, quick: Quick, x: Array, hurry: bool) -> Script | None:
        script, rounds = self._shares(x, quick.reducer), self._rounds
        looks, number = 0, rounds.number
        while looks < len(self._patience[not hurry]):
            for _ in script:
                break
            else:
                return None
            looks = looks + 1 if rounds.number == number else 0
            number = rounds.number
            if looks > _SPINS:
                os.sched_yield()
        return script

    def _array(self, tensor: torch.Tensor, reducer: Reducer) -> Array:
        # Three times as fast as asking the tensor for it.
        key = tensor.data_ptr(), tensor.numel(), reducer.storage
        array = self._arrays.get(key)
        if array is None:
            if len(self._arrays) >= _KEPT:
                self._arrays.clear()
            memory = (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
            array = self._arrays[key] = np.frombuffer(memoryview(memory), reducer.storage)
        return array

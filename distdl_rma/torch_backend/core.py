"""What all calls of a process group share: how a call begins, and how the group ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.distributed import ProcessGroup, ReduceOp, Work

from distdl_rma.errors import ArgumentError, DistdlError, ShapeError
from distdl_rma.segments.collectives.between_nodes import Messages, Script
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.collectives.reduction import Reduction
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.torch_backend.inter_node import InterNodeCollectives
from distdl_rma.torch_backend.node_slots import Call, NodeSlots
from distdl_rma.torch_backend.on_node import NodeCollectives
from distdl_rma.torch_backend.quick import QuickReductions
from distdl_rma.torch_backend.tensors import OVERLAP, Flat, facts, reducer_of
from distdl_rma.torch_backend.work import GroupWork, OperationQueue, PendingCall

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")
# What is kept for calls that come again, at most.
_KEPT = 1024
# The methods have the names that torch gives them, and more than one of its spellings.
_Base: Any = ProcessGroup


class GroupCore(_Base):  # type: ignore[misc]
    """Ranks of a machine, and how calls on them begin; see :class:`RmaProcessGroup`."""

    def __init__(
        self, manager: SegmentManager, ranks: Sequence[int], name: str, timeout: float | None
    ) -> None:
        self._me, self._ranks = tuple(ranks).index(manager.rank), len(ranks)
        super().__init__(self._me, self._ranks)
        self._manager, self._name, self._timeout = manager, name, timeout
        self._queue = OperationQueue(manager, name)
        self._messages = Messages(manager, ranks, f"messages of process group {name}")
        self._messages.connect()
        self._rounds: NodeSlots | None = None
        self._collectives: NodeCollectives | InterNodeCollectives
        self._caller: NodeSlots | InterNodeCollectives
        self._quick: QuickReductions | None = None
        layout = NodeLayout(tuple(ranks), manager.segment.direct_nodes, manager.rank)
        if len(layout.nodes) == 1:
            self._rounds = self._caller = NodeSlots(manager, ranks, name)
            self._collectives = on_node = NodeCollectives(self._rounds)
            self._quick = QuickReductions(self._rounds, self._queue, on_node)
            self._queue.progress = self._rounds.steps
        else:
            collectives = InterNodeCollectives(manager, self._messages, layout, name)
            self._collectives = self._caller = collectives
            self._rounds = collectives.rounds
        self._calls: dict[Hashable, Call] = {}
        self._reducers: dict[Hashable, Reduction] = {}
        self._coalescing: list[Work] | None = None
        # The latest works on one element, see GroupCollectives.
        self._counts: deque[Work] = deque(maxlen=64)

    def _begin(
        self,
        what: str,
        tensors: Sequence[Tensor],
        script: Callable[[], Script],
        result: Any,
        stored: Sequence[Flat] = (),
    ) -> Work:
        # ``what`` and the sizes of the tensors are the same on all ranks. ``stored`` fills the result.
        for flat in stored:
            if flat.overlaps:
                raise ShapeError(f"{self._who(what)}: {OVERLAP}")
        caller, call = self._caller, self._call(what, tensors)

        def begin() -> Script:
            caller.call = call
            return script()

        def finish() -> None:
            for flat in stored:
                flat.store()

        operation = self._queue.append(PendingCall(begin, caller.waiting, finish))
        return self._registered(GroupWork(self._queue, operation, result, self._timeout))

    def refuse(self, what: str, error: BaseException) -> None:
        """Announce to ranks that wait in a collective call that this rank refuses it; does not wait for them.

        They raise ``MismatchError`` with the reason. If all ranks refuse the call, the group stays usable.
        """
        caller, call = self._caller, Call.refused(what, error)

        def begin() -> Script:
            caller.call = call
            return self._collectives.barrier()

        # No rank waits for a group that has ended.
        with suppress(DistdlError):
            self._queue.append(PendingCall(begin, caller.waiting, None))

    def _call(self, what: str, tensors: Sequence[Tensor]) -> Call:
        key = (what, *[(tensor.dtype, tensor.numel()) for tensor in tensors])
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            text = f"{what} of {facts(tensors)}" if tensors else what
            call = self._calls[key] = Call(text, key)
        return call

    def _reducer(self, op: Any, dtype: torch.dtype) -> Reduction:
        reducer = self._reducers.get((op, dtype))
        if reducer is None:
            reducer = self._reducers[op, dtype] = reducer_of(op, dtype, self._ranks, f"group {self._name!r}")
        return reducer

    def _registered(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _who(self, what: str) -> str:
        return f"{what} in group {self._name!r}"

    def shutdown(self) -> None:
        """Free the memory; operations that other ranks wait for continue. Local, idempotent."""
        self._queue.close()
        if not self._manager.closed:
            if self._rounds is not None:
                leaving = self._leaving(self._queue, self._rounds)
                leaving()
                self._manager.retire(self._rounds.memory, leaving)
            # Otherwise messages under way would match those of the next group of these ranks.
            if self._queue.idle:
                self._messages.close()
                if isinstance(self._collectives, InterNodeCollectives):
                    self._collectives.close()
        self._rounds = self._quick = self._coalescing = None
        self._counts.clear()

    @staticmethod
    def _leaving(queue: OperationQueue, rounds: NodeSlots) -> Callable[[], bool]:
        """Return what continues the end of a group on this rank, and returns whether its memory is free.

        This rank leaves when none of its operations is under way. Until all ranks have left, they may write
        to each other, also after a call that some of them did not make.
        """
        left = False

        def leaving() -> bool:
            nonlocal left
            if not left and queue.resting:
                left = True
                rounds.leave()
            return left and rounds.left()

        return leaving


def of_all(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a collective call: if one rank refuses it, the others learn of that."""

    @wraps(method)
    def call(group: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(group, *args, **kwargs)
        except Exception as error:
            group.refuse(method.__name__, error)
            raise

    return call


def op_of(opts: Any) -> Any:
    """Reduction operation of some options, or the operation itself; the sum if None."""
    found = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if found is None else getattr(found, "op", found)


def root_of(opts: Any, ranks: int, who: str) -> int:
    """Root of some options; ``ArgumentError`` if it is none of so many ranks."""
    root = int(opts.rootRank) if opts is not None else 0
    if not 0 <= root < ranks:
        raise ArgumentError(f"{who}: the root is a rank in the group, from 0 to {ranks - 1}, got {root}")
    return root

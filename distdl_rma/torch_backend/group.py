"""The process group: the methods that torch calls, each of which begins an operation on the segments.

The way of a collective, from torch to the data::

    torch        group.broadcast(tensors, options)
    collectives  checks them, returns what moves (Prepared)         refused? announced to the other ranks
    group        _begin: a PendingCall in the queue, and a GroupWork for torch
    queue        makes its script when the calls before it are over, and advances it from every wait
    ways         the script: rounds of node_slots on a node, MPI between nodes
    queue        copies results back to tensors that are not contiguous; the work is over

Only messages of two ranks leave this way: they have a list of their own in the queue, and wait for no
collective.

A group *has* a queue, ways, messages and a :class:`Member`; nothing of these knows torch's class. torch's own
class is a base class all the same, since torch calls its groups from C++.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from distdl_rma.errors import DistdlError, ShapeError, UnsupportedError
from distdl_rma.segments.collectives.between_nodes import Messages, Script
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.torch_backend import collectives
from distdl_rma.torch_backend.calls import Call, Callers
from distdl_rma.torch_backend.collectives import Member, Prepared, Tensor, Ways
from distdl_rma.torch_backend.inter_node import InterNodeCollectives
from distdl_rma.torch_backend.node_slots import NodeSlots
from distdl_rma.torch_backend.on_node import NodeCollectives
from distdl_rma.torch_backend.operations import OperationQueue, PendingCall
from distdl_rma.torch_backend.point_to_point import PointToPoint
from distdl_rma.torch_backend.tensors import OVERLAP, Flat, check, single
from distdl_rma.torch_backend.work import GroupWork

# Typed as anything: the methods have more than one of torch's spellings.
_Base: Any = ProcessGroup


def _collective(prepare: Callable[..., Prepared]) -> Callable[..., Work]:
    """Make torch's method of a collective; if one rank refuses the call, the others learn of that."""

    @wraps(prepare)
    def call(group: RmaProcessGroup, /, *args: Any, **kwargs: Any) -> Work:
        try:
            return group._begin(prepare(group._member, *args, **kwargs), args[-1] if args else None)
        except Exception as error:
            group.refuse(prepare.__name__, error)
            raise

    return call


class RmaProcessGroup(_Base):  # type: ignore[misc]
    """A process group of torch on the segments of a machine, for tensors on the processor.

    ``torch.distributed.init_process_group("rma")`` and ``new_group`` make it, collectively over its ranks and
    blocking. A call begins an operation and returns a work to wait for. The collectives of a group run one
    after another in the order of the calls, which is the same on all ranks; every wait on the machine
    advances all of them. If calls, sizes, types or roots differ, every rank raises ``MismatchError`` and the
    group cannot be used any more. ``ExchangeTimeout`` names the missing ranks; the wait can be repeated.

    ``ranks`` are the rank ids of the machine by rank in the group; ``timeout`` is in seconds, None for the
    machine's timeout.
    """

    def __init__(
        self, manager: SegmentManager, ranks: Sequence[int], name: str, timeout: float | None
    ) -> None:
        me, size = tuple(ranks).index(manager.rank), len(ranks)
        super().__init__(me, size)
        self._manager, self._timeout = manager, timeout
        self._torch_name, self._description = name, "undefined"
        self._queue = OperationQueue(manager, name)
        self._messages = Messages(manager, ranks, f"messages of process group {name}")
        self._messages.connect()
        self._points = PointToPoint(self._messages, self._queue, me, name)
        # Who is told of each call before it moves data; and what compares the calls of all ranks first, where
        # the rounds of a node do not do so by themselves.
        self._callers: Callers
        self._compare: Callable[[], Script] | None = None
        ways: Ways
        layout = NodeLayout(tuple(ranks), manager.segment.direct_nodes, manager.rank)
        if len(layout.nodes) == 1:
            self._callers = rounds = NodeSlots(manager, ranks, name)
            ways = NodeCollectives(rounds)
            self._queue.progress = lambda: rounds.number
        else:
            self._callers = ways = InterNodeCollectives(manager, self._messages, layout, name)
            self._compare = ways.compare
        self._ways, self._member = ways, Member(me, size, name, ways)
        # One work for all calls that have waited already: nobody else sees it.
        self._over = GroupWork(self._queue, [], [], None)
        # The works of a block of coalesced calls, None outside of one.
        self._coalescing: list[GroupWork] | None = None
        # The latest works on one element. DDP passes the work that counts the joined ranks to C++. There it
        # would wait for ever once Python holds no reference to it.
        self._counts: deque[Work] = deque(maxlen=64)

    def _begin(self, prepared: Prepared, opts: Any = None) -> Work:
        call, script, result, stored = prepared
        for flat in stored:
            if flat.overlaps:
                raise ShapeError(f"{call.text} {self._member.where}: {OVERLAP}")
        callers, compare = self._callers, self._compare

        def begin() -> Script:
            callers.call = call
            return script() if compare is None else chain(compare(), script())

        # torch waits at once for a call that is not asynchronous, and then needs no work of its own. Between
        # nodes a look takes much longer.
        waits = compare is None and self._coalescing is None and not getattr(opts, "asyncOp", True)
        operation = self._queue.append(
            PendingCall(begin, callers.waiting, [flat.store for flat in stored]), waits
        )
        if waits and operation.done and operation.error is None:
            return self._over
        work = self._registered(GroupWork(self._queue, [operation], result, self._timeout))
        if len(result) == 1 and isinstance(result[0], Tensor) and result[0].numel() == 1:
            self._counts.append(work)
        return work

    def refuse(self, what: str, error: BaseException) -> None:
        """Announce to ranks that wait in a collective call that this rank refuses it; does not wait for them.

        They raise ``MismatchError`` with the reason. If all ranks refuse the call, the group stays usable.
        """
        # No rank waits for a group that has ended.
        with suppress(DistdlError):
            self._begin((Call.refused(what, error), self._ways.barrier, [], []))

    def shutdown(self) -> None:
        """Free the memory; operations that other ranks wait for continue. Local, idempotent."""
        queue, ways = self._queue, self._ways
        queue.close()
        if not self._manager.closed:
            if ways.rounds is not None:
                ways.rounds.close(lambda: queue.resting)
            # Otherwise messages under way would match those of the next group of these ranks.
            if queue.idle:
                self._messages.close()
                if isinstance(ways, InterNodeCollectives):
                    ways.close()
        self._coalescing = None
        self._counts.clear()

    abort = shutdown

    # The collectives, by all of torch's names: spellings came and went.
    broadcast = _collective(collectives.broadcast)
    allgather = _collective(collectives.allgather)
    allgather_coalesced = _collective(collectives.allgather_coalesced)
    _allgather_base = all_gather_single = _collective(collectives.all_gather_single)
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective(
        collectives.all_gather_single_coalesced
    )
    gather = _collective(collectives.gather)
    scatter = _collective(collectives.scatter)
    alltoall = _collective(collectives.alltoall)
    alltoall_base = all_to_all_single = _collective(collectives.all_to_all_single)
    allreduce = _collective(collectives.allreduce)
    allreduce_coalesced = _collective(collectives.allreduce_coalesced)
    reduce = _collective(collectives.reduce)
    reduce_scatter = _collective(collectives.reduce_scatter)
    _reduce_scatter_base = reduce_scatter_single = _collective(collectives.reduce_scatter_single)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective(
        collectives.reduce_scatter_single_coalesced
    )

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        """Wait until all ranks have called."""
        return self._begin((self._member.call("barrier", []), self._ways.barrier, [], []), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called; blocking. ``ExchangeTimeout`` names the ranks that have not."""
        work: Any = self._begin((self._member.call("monitored_barrier", []), self._ways.barrier, [], []))
        work.wait(timeout)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        return self._message("send", tensors, target, tag, [self._member.me])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        return self._message("recv", tensors, source, tag, [source])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive a tensor with this tag from the first rank of the group that sends one."""
        return self._message("recv", tensors, -1, tag, [])

    def _message(self, verb: str, tensors: Sequence[Tensor], peer: int, tag: int, source: list[int]) -> Work:
        # The work names the source; a list without one gets it when the message of any rank comes.
        who = f"{verb} {self._member.where}"
        tensor: Tensor = single(tensors, who)
        check([tensor], who)
        flat, kind = Flat(tensor), str(tensor.dtype)
        if flat.overlaps and verb == "recv":
            raise ShapeError(f"{who}: {OVERLAP}")
        if source:
            finish = [flat.store] if verb == "recv" else []
            operation = self._points.begin(verb, flat.bytes, kind, peer, tag, finish)
        else:
            operation = self._points.receive_any(flat.bytes, kind, tag, source.append, [flat.store])
        return self._registered(GroupWork(self._queue, [operation], [tensor], self._timeout, source))

    def _registered(self, work: GroupWork) -> GroupWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        if len(works) == 1:
            return works[0]
        operations = [operation for work in works for operation in work.operations]
        results = [*chain.from_iterable(work.result() for work in works)]
        return GroupWork(self._queue, operations, results, self._timeout)

    def drop_coalescing(self) -> None:
        """End a block of coalesced calls after an error; operations that it began continue."""
        self._coalescing = None

    # What torch asks a group about itself.

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return "rma"

    name = getBackendName

    # torch finds groups by a name, which it sets after it has made them.

    def getGroupName(self) -> str:  # noqa: N802
        """Name by which torch knows the group."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch knows the group."""
        self._torch_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits that begin from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> RmaProcessGroup:
        if torch.device(device).type != "cpu":
            where = self._member.where
            raise UnsupportedError(f"a call {where}: backend 'rma' is for tensors on cpu, not {device}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # torch reads them to decide whether it can save checkpoints during training.
        return [torch.device("cpu")]

"""The process group: all that torch calls, as collectives and messages on the segments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import Work

from distdl_rma.errors import UnsupportedError
from distdl_rma.process_group.core import Tensor
from distdl_rma.process_group.data_collectives import DataCollectives
from distdl_rma.process_group.point_to_point import PointToPoint
from distdl_rma.process_group.reducing_collectives import ReducingCollectives
from distdl_rma.process_group.tensors import Flat, check, single
from distdl_rma.process_group.work import GroupWork
from distdl_rma.segments.manager import SegmentManager


class RmaProcessGroup(ReducingCollectives, DataCollectives):
    """A process group of torch on the segments of a machine, for tensors on the processor.

    Made by ``torch.distributed.init_process_group("rma")`` and ``new_group``; collective over its ranks to
    make, blocking. Calls begin an operation and return a work to wait for. Collectives of a group follow one
    another in the order of the calls, which is the same on all ranks; every wait on the machine takes all of
    them further. ``MismatchError`` on every rank where calls, sizes, types or roots differ; the group cannot
    be used after it. ``ExchangeTimeout`` names those that are missing, and the wait can be repeated.

    ``ranks`` are the rank ids of the machine by rank in the group; ``timeout`` is in seconds, None for that
    of the machine.
    """

    def __init__(
        self, manager: SegmentManager, ranks: Sequence[int], name: str, timeout: float | None
    ) -> None:
        super().__init__(manager, ranks, name, timeout)
        self._points = PointToPoint(self._messages, self._queue, self._me, name)
        self._torch_name, self._description = name, "undefined"

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return "rma"

    name = getBackendName

    # torch finds groups by a name, which it gives them after they are made.

    def getGroupName(self) -> str:  # noqa: N802
        """Name by which torch knows the group."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name by which torch knows the group."""
        self._torch_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in words of its maker."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """Have waits that begin from now on end after another time."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> RmaProcessGroup:
        if torch.device(device).type != "cpu":
            raise UnsupportedError(
                f"{self._who('a call')}: backend 'rma' is for tensors on cpu, not {device}"
            )
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # By these torch knows that it may save checkpoints beside the training.
        return [torch.device("cpu")]

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        """Wait until all ranks have called."""
        return self._begin("barrier", [], self._way.barrier, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called, blocking; ``ExchangeTimeout`` names those that have not."""
        work: Any = self._begin("monitored_barrier", [], self._way.barrier, [])
        work.wait(timeout)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        flat, tensor = self._message(tensors, "send")
        operation = self._points.send(flat.bytes, str(tensor.dtype), target, tag)
        return self._kept(GroupWork(self._queue, operation, [tensor], self._timeout, self._me))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        flat, tensor = self._message(tensors, "recv")
        operation = self._points.receive(flat.bytes, str(tensor.dtype), source, tag, flat.store)
        return self._kept(GroupWork(self._queue, operation, [tensor], self._timeout, source))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive a tensor from whichever rank of the group is the first to send one with this tag."""
        flat, tensor = self._message(tensors, "recv")
        found: list[int] = []
        operation = self._points.receive_any(flat.bytes, str(tensor.dtype), tag, found.append, flat.store)
        return self._kept(GroupWork(self._queue, operation, [tensor], self._timeout, found))

    def _message(self, tensors: Sequence[Tensor], what: str) -> tuple[Flat, Tensor]:
        tensor: Tensor = single(tensors, self._who(what))
        check([tensor], self._who(what))
        return Flat(tensor), tensor

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return works[0] if len(works) == 1 else _Several(works)

    def drop_coalescing(self) -> None:
        """End a block of coalesced calls that an error left; what it began goes on."""
        self._coalescing = None

    abort = ReducingCollectives.shutdown


_Work: Any = Work


class _Several(_Work):  # type: ignore[misc]
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all([work.wait(timeout) for work in self._works])  # noqa: C419

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of all their tensors."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: list(chain.from_iterable(one.value() for one in done.value())))

"""The process group: the methods that torch calls, as collectives and messages on the segments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import Work

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.torch_backend.collectives import GroupCollectives
from distdl_rma.torch_backend.core import Tensor
from distdl_rma.torch_backend.point_to_point import PointToPoint
from distdl_rma.torch_backend.tensors import OVERLAP, Flat, check, single
from distdl_rma.torch_backend.work import GroupWork


class RmaProcessGroup(GroupCollectives):
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
        super().__init__(manager, ranks, name, timeout)
        self._points = PointToPoint(self._messages, self._queue, self._me, name)
        self._torch_name, self._description = name, "undefined"

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
            raise UnsupportedError(
                f"{self._who('a call')}: backend 'rma' is for tensors on cpu, not {device}"
            )
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # torch reads them to decide whether it can save checkpoints during training.
        return [torch.device("cpu")]

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        """Wait until all ranks have called."""
        return self._begin("barrier", [], self._collectives.barrier, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called; blocking. ``ExchangeTimeout`` names the ranks that have not."""
        work: Any = self._begin("monitored_barrier", [], self._collectives.barrier, [])
        work.wait(timeout)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        flat, tensor = self._message(tensors, "send")
        operation = self._points.begin("send", flat.bytes, str(tensor.dtype), target, tag)
        return self._registered(GroupWork(self._queue, operation, [tensor], self._timeout, self._me))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        flat, tensor = self._message(tensors, "recv")
        operation = self._points.begin("recv", flat.bytes, str(tensor.dtype), source, tag, flat.store)
        return self._registered(GroupWork(self._queue, operation, [tensor], self._timeout, source))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive a tensor with this tag from the first rank of the group that sends one."""
        flat, tensor = self._message(tensors, "recv")
        found: list[int] = []
        operation = self._points.receive_any(flat.bytes, str(tensor.dtype), tag, found.append, flat.store)
        return self._registered(GroupWork(self._queue, operation, [tensor], self._timeout, found))

    def _message(self, tensors: Sequence[Tensor], what: str) -> tuple[Flat, Tensor]:
        tensor: Tensor = single(tensors, self._who(what))
        check([tensor], self._who(what))
        flat = Flat(tensor)
        if flat.overlaps and what == "recv":
            raise ShapeError(f"{self._who(what)}: {OVERLAP}")
        return flat, tensor

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return works[0] if len(works) == 1 else _Several(works)

    def drop_coalescing(self) -> None:
        """End a block of coalesced calls after an error; operations that it began continue."""
        self._coalescing = None

    abort = GroupCollectives.shutdown


_Work: Any = Work


class _Several(_Work):  # type: ignore[misc]
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self._works])  # noqa: C419

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [*chain.from_iterable(work.result() for work in self._works)]

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: list(chain.from_iterable(one.value() for one in done.value())))

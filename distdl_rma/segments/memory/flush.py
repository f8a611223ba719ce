"""Waiting until what was put has arrived at some peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distdl_rma.segments.waiter import check_timeout
from distdl_rma.segments.waiting.wait_reason import WaitReason

if TYPE_CHECKING:
    from distdl_rma.segments.manager import SegmentManager


def flush(manager: SegmentManager, ranks: Sequence[int], timeout: float | None) -> None:
    """Wait until all puts and notifications from here to some ranks have arrived there; blocking.

    What is under way to different ranks goes on together.

    Raises
    ------
    ExchangeTimeout
        At the deadline, naming the ranks that have not taken theirs; the call can be repeated.
    """
    if timeout is not None:
        check_timeout(timeout)
    manager.check_open()
    links = {rank: manager.segment.link(rank) for rank in ranks}
    for link in links.values():
        link.close_delivery()

    def left() -> tuple[int, ...]:
        return tuple(rank for rank, link in links.items() if not link.advance())

    manager.waiter.until(lambda: not left(), lambda: WaitReason(left(), "to take its puts"), timeout)

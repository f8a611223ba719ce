"""Waiting until what was put has arrived at some peers."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.waiter import check_timeout
from distdl_rma.segments.waiting.wait_reason import WaitReason


def flush(context: SegmentContext, ranks: Sequence[int], timeout: float | None) -> None:
    """Wait until all puts and notifications from here to some ranks have arrived there; blocking.

    What is under way to different ranks goes on together. After ``ExchangeTimeout``, which names the ranks
    that have not taken theirs, the call can be repeated.
    """
    check_timeout(timeout)
    context.check_open()
    links = {rank: context.segment.link(rank) for rank in ranks}
    for link in links.values():
        link.close_delivery()

    def late() -> tuple[int, ...]:
        return tuple(rank for rank, link in links.items() if not link.advance())

    context.waiter.until(lambda: not late(), lambda: WaitReason(late(), "to take its puts"), timeout)

"""Errors in collective calls: all ranks raise together, so that their machine stays usable."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_rma.errors import DistdlError, PeerFailedError
from distdl_rma.segments.collectives.barrier import Barrier
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.error_texts import USABLE, append_state, cause_of

# How long a rank waits for the others to raise too; ranks that wait in vain notice this after a second.
GRACE_SECONDS = 5.0


def raise_together(manager: SegmentManager, error: Exception, ranks: Sequence[int]) -> bool:
    """Meet the other ranks that raised; True if all came, and the machine stays usable; else it is lost.

    Blocking, for seconds if not all ranks come. Ranks that wait for one that is here raise
    ``PeerFailedError`` after a second; so no rank waits for another once all are here. Operations that only
    some ranks have begun, such as handshakes, are given up: the callers drop whatever they have connected.
    The last sentence of the error says how it ended.
    """
    if not manager.notices.any_failed:
        began = error if isinstance(error, PeerFailedError) else None
        manager.watch.settle(began.cause if began else cause_of(error), began.rank if began else manager.rank)
        try:
            _meet(manager, tuple(sorted(ranks)))
            append_state(error, USABLE)
            return True
        except DistdlError:
            # Not all have come.
            pass
        finally:
            manager.watch.resume()
    manager.fail(error)
    return False


def _meet(manager: SegmentManager, ranks: tuple[int, ...]) -> None:
    others = [rank for rank in ranks if rank != manager.rank]
    given_up = manager.forget_handshakes(others)
    # Puts under way may reach memory that others will use again.
    manager.flush(others, GRACE_SECONDS)
    for key, shared in tuple(manager.shared_objects.items()):
        # Some ranks may have begun an epoch that others have not.
        if isinstance(shared, EqualityCheck) and {*shared.ranks} <= {*ranks}:
            del manager.shared_objects[key]
    barrier = manager.shared_objects.get((Barrier, ranks))
    if not isinstance(barrier, Barrier):
        barrier = manager.shared_objects[Barrier, ranks] = Barrier(manager, ranks, "ranks that raise")
    barrier.wait(GRACE_SECONDS)
    # A rank that gave up waiting there does not come here, so that no rank passes.
    barrier.wait()
    manager.handshakes.difference_update(given_up)

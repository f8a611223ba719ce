"""What ranks do about an error in a call that all of them make: raise it together, so that they can go on."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_rma.errors import DistdlError, PeerFailedError
from distdl_rma.segments.collectives.barrier import Barrier
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.peer_watch import USABLE, cause_of, say_state

# So long a rank waits for the others to raise too: those that wait in vain notice after a second.
GRACE_SECONDS = 5.0


def settled(manager: SegmentManager, error: Exception, ranks: Sequence[int]) -> bool:
    """Whether some ranks of a machine raise together, so that it can be used further; else it is lost.

    Blocking, for seconds if not all come. Ranks that wait for one that is here raise ``PeerFailedError``
    after a second. When all are here, none of them waits for what another one has not done; what was half
    done then, as a handshake that only some have begun, is never gone on with: the callers drop what they
    have connected. The error says how it ended.
    """
    if not manager.notices.in_vain:
        began = error if isinstance(error, PeerFailedError) else None
        manager.watch.settle(began.cause if began else cause_of(error), began.rank if began else manager.rank)
        try:
            _meet(manager, tuple(sorted(ranks)))
            say_state(error, USABLE)
            return True
        except DistdlError:
            # Not all have come.
            pass
        finally:
            manager.watch.goes_on()
    manager.fail(error)
    return False


def _meet(manager: SegmentManager, ranks: tuple[int, ...]) -> None:
    others = [rank for rank in ranks if rank != manager.rank]
    manager.forget_handshakes(others)
    # What is under way may go to memory that others will use again.
    manager.flush(others, GRACE_SECONDS)
    for key, kept in tuple(manager.kept.items()):
        # Some may have begun to say something to others that did not listen.
        if isinstance(kept, EqualityCheck) and {*kept.ranks} <= {*ranks}:
            del manager.kept[key]
    barrier = manager.kept.get((Barrier, ranks))
    if not isinstance(barrier, Barrier):
        barrier = manager.kept[Barrier, ranks] = Barrier(manager, ranks, "ranks that raise")
    barrier.wait(GRACE_SECONDS)
    # Who gave up waiting there does not come here, and nobody passes.
    barrier.wait()

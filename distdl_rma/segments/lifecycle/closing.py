"""How the ranks of a machine come together to close it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from mpi4py import MPI

from distdl_rma.errors import DistdlError, ExchangeTimeout
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.peer_watch import FailureNotices, PeerWatch
from distdl_rma.segments.waiting.waiter import Waiter

_WHY = "closing the machine or ending its program"
# How long a rank that failed stays for the others to notice.
_NOTICE_SECONDS = 1.0


class Closing:
    """Has the ranks of a machine wait for each other before any of them frees what the others use.

    Freeing windows cannot be interrupted, so that nobody begins before all are here. And MPI has no way to
    take back that a rank came. So the ranks meet twice: one that gave up waiting for the first meeting does
    not come to the second, unless it calls again.
    """

    def __init__(
        self, comm: MPI.Intracomm, segment: Segment, notices: FailureNotices, watch: PeerWatch, waiter: Waiter
    ) -> None:
        self._comm, self._segment = comm, segment
        self._notices, self._watch, self._waiter = notices, watch, waiter
        self._meetings: list[MPI.Request] = []

    def gather(self, timeout: float | None = None) -> None:
        """Wait until all ranks are about to close; blocking, collective.

        ``ExchangeTimeout`` names those that do not come: this rank has not left then, and the call can be
        repeated. ``PeerFailedError`` if a rank failed, or its process has ended, also while it was closing.
        """
        try:
            self._meet(timeout)
        except BaseException:
            self._watch.stay()
            raise

    def gather_at_exit(self, say: Callable[[str], object]) -> bool:
        """Wait until all ranks are about to close, as long as they live; return whether they came.

        Raises no error of the library: nobody could catch it. The end of MPI would wait for the others as
        well. What keeps this rank from ending, now or there, is said once, in a line each.
        """
        notices, watch = self._notices, self._watch
        if notices.failed:
            # The others do not close any more, and may be at MPI's end, where they answer nothing.
            waiting = WaitReason(watch.others, "to hear of its failure", leavers=True)
            with suppress(DistdlError):
                self._waiter.until(notices.noticed, lambda: waiting, _NOTICE_SECONDS)
        else:
            with suppress(DistdlError):
                try:
                    self._meet(None)
                except ExchangeTimeout as error:
                    say(f"{error}; rank {watch.rank} has ended its program and waits on")
                    self._meet(float("inf"))
        if not notices.in_vain:
            return True
        # Others may already wait for this rank to close as well.
        notices.pass_on()
        for rank, why in watch.gone():
            say(
                f"rank {rank} will not end together with rank {watch.rank}: {why}; MPI, which ends now,"
                " may wait for it for ever: end the job if it does"
            )
        return False

    def _meet(self, timeout: float | None) -> None:
        watch, waiter = self._watch, self._waiter
        # Peers may still wait for what this rank began to send. Those that have left take it nevertheless.
        waiter.until(
            self._segment.progress,
            lambda: WaitReason(watch.others, "to take its last puts", leavers=True),
            timeout,
        )
        watch.leave(_WHY)
        waiter.until(
            self._all_here, lambda: WaitReason(watch.missing(), "to close the machine", leavers=True), timeout
        )

    def _all_here(self) -> bool:
        if not self._meetings:
            self._meetings.append(self._comm.Ibarrier())
        if not self._meetings[0].Test():
            return False
        if len(self._meetings) == 1:
            self._meetings.append(self._comm.Ibarrier())
        return bool(self._meetings[1].Test())

"""How a rank that fails tells the others, and how they learn of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.waiting.header import HeaderWriter, RankState, WaitReason, clip

_NOTICE_BYTES = 1024


class FailureNotices:
    """Notices that ranks send each other when one of them fails; every wait takes in those that have come.

    They have a communicator of their own, freed by ``close``; ``ranks`` are the rank ids of its positions.
    The lock is held while MPI is called: the progress engine is another thread. ``failures`` has causes by
    rank, as far as this one has heard or found out; ``failed`` is whether it has told the others that it
    failed itself, as its header then says too.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        lock: AbstractContextManager[Any],
        header: HeaderWriter,
    ) -> None:
        self._comm, self._ranks, self._lock, self._header = comm, ranks, lock, header
        self.rank = ranks[comm.rank]
        self.failures: dict[int, str] = {}
        self.failed = False
        self._sent: list[tuple[MPI.Request, object]] = []

    @property
    def in_vain(self) -> bool:
        """Whether this rank or another one has failed, so that nothing collective can work any more."""
        return self.failed or bool(self.failures)

    def poll(self) -> None:
        """Take in notices of failed ranks, and let MPI look at the network. Does not block."""
        # Also without remote peers: a handshake's message may still sit in this rank's MPI.
        # Matched: between nodes MPICH's Recv from any source may never find the synchronous message again.
        while (found := self._comm.Improbe()) is not None:
            notice = np.zeros(_NOTICE_BYTES, np.uint8)
            found.Recv([notice, MPI.BYTE])
            failed = int(notice[:8].view(np.int64)[0])
            text = notice[8:].tobytes().rstrip(b"\0").decode(errors="replace")
            self.failures.setdefault(failed, text)

    def check(self, reason: Callable[[], WaitReason] | None = None) -> None:
        """Raise ``PeerFailedError`` if a rank has failed, as far as this one knows."""
        for rank, cause in self.failures.items():
            self.raise_for(rank, cause, reason() if reason else None)

    def raise_for(self, rank: int, cause: str, reason: WaitReason | None) -> NoReturn:
        """Raise ``PeerFailedError`` because of a rank that failed, or left while it is waited for."""
        here = f"; rank {self.rank} waited {reason}" if reason else ""
        raise PeerFailedError(f"rank {rank} failed: {cause}{here}", rank, cause)

    def tell(self, cause: str, rank: int | None = None) -> None:
        """Tell all ranks that this one failed, or that it found another one failed; once, not blocking."""
        if self.failed:
            return
        self.failed = True
        failed = self.rank if rank is None else rank
        self._header.write(RankState.FAILED, cause)
        notice = np.zeros(_NOTICE_BYTES, np.uint8)
        notice[:8].view(np.int64)[0] = failed
        text = clip(cause, _NOTICE_BYTES - 8)
        notice[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        with self._lock:
            for position, peer in enumerate(self._ranks):
                if peer not in (self.rank, failed):
                    # Synchronous: complete once the peer has taken it in.
                    self._sent.append((self._comm.Issend([notice, MPI.BYTE], position), notice))

    def pass_on(self) -> None:
        """Tell all ranks of the first failure that this one has heard of, if they have not been told."""
        for rank, cause in tuple(self.failures.items())[:1]:
            self.tell(cause, rank)

    def noticed(self) -> bool:
        """Whether all ranks have taken in the notice of this rank's failure; makes progress."""
        with self._lock:
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            self.poll()
        return not self._sent

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()


def cause_of(error: BaseException) -> str:
    """Error as one line for the notice of a failure."""
    with suppress(Exception):
        first = str(error).strip().splitlines()
        return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    return type(error).__name__

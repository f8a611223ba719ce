"""The message of a wait that reached its deadline: who was waited for, and what those ranks do instead."""

from __future__ import annotations

import time

from distdl_rma.segments.waiting.header import RankState
from distdl_rma.segments.waiting.peer_headers import PeerHeaders
from distdl_rma.segments.waiting.wait_reason import WaitReason

# How long a rank of another node may take to answer before it counts as silent.
ANSWER_SECONDS = 1.0
_LONGEST_CHAIN = 16


def timeout_message(rank: int, headers: PeerHeaders, reason: WaitReason, seconds: float) -> str:
    """Text for ``ExchangeTimeout``, with the chain of those who wait for each other; blocks as `chain`."""
    # Who only looks once does not want to know why nothing has come yet.
    clauses = chain(rank, headers, reason, min(seconds, ANSWER_SECONDS)) if seconds else []
    hint = [reason.hint] if reason.hint else []
    return "; ".join([f"rank {rank} waited {in_seconds(seconds)} {reason}", *clauses, *hint])


def chain(rank: int, headers: PeerHeaders, reason: WaitReason, seconds: float = ANSWER_SECONDS) -> list[str]:
    """What the ranks are doing that a rank waits for, those that they wait for, and so on, a clause each.

    Blocking for so many seconds at most, for ranks of other nodes.
    """
    deadline = time.monotonic() + seconds
    told, pending = {rank}, list(reason.ranks)
    clauses: list[str] = []
    while pending and len(clauses) < _LONGEST_CHAIN:
        peer = pending.pop(0)
        if peer in told:
            continue
        told.add(peer)
        record = headers.read(peer, deadline)
        if record is None:
            why = (
                "its header could not be read"
                if headers.is_near(peer)
                else f"no answer within {in_seconds(seconds)}"
            )
            clauses.append(f"rank {peer} is silent: {why}")
        elif headers.process_is_gone(peer, record):
            clauses.append(f"rank {peer} is silent: its process {record.process} has ended")
        else:
            silent = headers.unchanged(peer, record)
            also = f", and has said nothing for {in_seconds(silent)}" if silent > ANSWER_SECONDS else ""
            clauses.append(f"rank {peer} {record.doing}{also}")
            if record.state is RankState.WAITING:
                pending += record.waits_for
    return clauses


def in_seconds(seconds: float) -> str:
    """Time for a message: tenths of a second, less than one to two digits."""
    if seconds < 1:
        return f"{float(f'{seconds:.2g}'):g} s"
    return f"{seconds:.1f}".removesuffix(".0") + " s"

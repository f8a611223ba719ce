"""Bytes of every rank for all ranks, such as what each was configured with; at set-up, not in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.manager import SegmentManager


def gather_bytes(manager: SegmentManager, words: bytes, name: str) -> dict[bytes, tuple[int, ...]]:
    """What all ranks of the machine say, each with the rank ids that say it; alike on all of them.

    Collective over the machine, blocking; ``name`` is for messages, alike on all ranks. Only digests travel
    where all say the same.
    """
    ranks = manager.ranks
    digest = np.array([len(words), fingerprint(words)], np.int64)
    digests = _gathered(manager, digest.size, digest, f"{name} (digests)").reshape(len(ranks), digest.size)
    if (digests == digest).all():
        return {words: ranks}
    lengths = digests[:, 0].tolist()
    everything = _gathered(manager, lengths, np.frombuffer(words, np.uint8), f"{name} (words)").tobytes()
    said: dict[bytes, tuple[int, ...]] = {}
    end = 0
    for rank, length in zip(ranks, lengths, strict=True):
        begin, end = end, end + length
        theirs = everything[begin:end]
        said[theirs] = (*said.get(theirs, ()), rank)
    return said


def _gathered(manager: SegmentManager, counts: int | Sequence[int], mine: Array, name: str) -> Array:
    collective = Allgather(manager, manager.ranks, counts, mine.dtype, name)
    try:
        collective.active[:] = mine
        collective.start()
        return collective.wait().copy()
    finally:
        collective.close()

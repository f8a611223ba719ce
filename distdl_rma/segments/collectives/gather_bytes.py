"""Words of every rank for all ranks, such as what each was configured with; at set-up, not in a step."""

from __future__ import annotations

import numpy as np

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.manager import SegmentManager


def gather_bytes(manager: SegmentManager, words: bytes, name: str) -> dict[bytes, tuple[int, ...]]:
    """What all ranks of the machine say, and who says it; collective over them, blocking.

    Only digests travel where all ranks say the same.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    words
        What this rank says.
    name
        For messages, alike on all ranks.

    Returns
    -------
    dict
        Words to the rank ids that say them, in the order of the machine; the same on all ranks.
    """
    ranks = manager.ranks
    digest = np.array([len(words), fingerprint(words)], np.int64)
    heads = _gathered(Allgather(manager, ranks, digest.size, np.int64, f"{name} (digests)"), digest)
    heads = heads.reshape(len(ranks), digest.size)
    if (heads == digest).all():
        return {words: ranks}
    lengths = heads[:, 0].tolist()
    mine = np.frombuffer(words, np.uint8)
    everything = _gathered(Allgather(manager, ranks, lengths, np.uint8, f"{name} (words)"), mine).tobytes()
    said: dict[bytes, tuple[int, ...]] = {}
    end = 0
    for rank, length in zip(ranks, lengths, strict=True):
        begin, end = end, end + length
        theirs = everything[begin:end]
        said[theirs] = (*said.get(theirs, ()), rank)
    return said


def _gathered(collective: Allgather, mine: Array) -> Array:
    try:
        collective.active[:] = mine
        collective.start()
        return collective.wait().copy()
    finally:
        collective.close()

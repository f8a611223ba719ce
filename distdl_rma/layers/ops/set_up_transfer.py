"""Movement of tensors that move once, for example at set-up: in passes, to need little segment memory.

A movement would hold segment memory as large as the tensor, for one use. In passes, a run of each part moves
at a time, and the segment holds two runs::

    part of rank 0   |run 0|run 1|run 2|..
    part of rank 1   |run 0|run 1|..|           a shorter part repeats elements in its last runs
                        |
    pass 0 moves run 0 of all parts, pass 1 run 1, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.intervals import Listed, meeting
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import as_words, word_dtype
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.staging import down, up
from distdl_rma.segments.collectives.allgather import Allgather, Bcast
from distdl_rma.segments.consensus import Consensus
from distdl_rma.segments.machine import Machine

# Bytes per pass. A segment holds two passes of received data, and two of data that are staged.
PASS_NBYTES = 1 << 19
_WORD = 8


def broadcast_from_first(
    machine: Machine, ranks: Sequence[int], tensors: Sequence[torch.Tensor], name: str
) -> None:
    """Overwrite tensors on all ranks by those of the first rank; collective over ``ranks``, blocking.

    If the tensors are equal on all ranks, as for layers with one seed, ranks exchange only a digest.
    Otherwise all tensors move as one vector, in passes of half a MiB. Meanwhile each rank's segment, also the
    first rank's, holds two passes. On a node all ranks load from one rank; between nodes MPI's broadcast
    carries one copy to each node. ``MismatchError`` if the ranks' tensors differ in shape or type, in the
    order given; ``UnsupportedError`` if a type does not move between ranks.
    """
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    for _, dtype in kinds:
        word_dtype(dtype, name)
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    # The tensors themselves where they are contiguous and on the CPU, else copies.
    plain = [down(tensor.resolve_conj().resolve_neg()).contiguous() for tensor in filled]
    title = f"{name} (initial values, {fingerprint(kinds):014x})"
    vectors = [tensor.view(-1).view(torch.uint8) for tensor in plain]
    if not vectors or _are_equal(machine, ranks, vectors, title):
        return
    _broadcast(machine, ranks, vectors, title)
    for tensor, copy in zip(filled, plain, strict=True):
        if not tensor.is_cpu or copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)


def _are_equal(machine: Machine, ranks: Sequence[int], vectors: Sequence[torch.Tensor], title: str) -> bool:
    digest = blake2b(digest_size=2 * _WORD)
    for vector in vectors:
        digest.update(vector.numpy().data)
    first, second = (int(word) for word in np.frombuffer(digest.digest(), np.int64))
    return Consensus.of(machine.segments, ranks).alike(title, first, second, 0)


def _broadcast(machine: Machine, ranks: Sequence[int], vectors: Sequence[torch.Tensor], name: str) -> None:
    total = sum(vector.numel() for vector in vectors)
    count, sends = min(total, PASS_NBYTES), machine.rank == ranks[0]
    passes = Bcast(machine.segments, ranks, count, np.uint8, ranks[0], name)
    try:
        for low in range(0, total, count):
            spans = list(_spans(vectors, low, min(low + count, total)))
            active = as_tensor(passes.active)
            for span, part in spans if sends else ():
                active[span] = part
            passes.start()
            result = as_tensor(passes.wait())
            for span, part in () if sends else spans:
                part.copy_(result[span])
    finally:
        passes.close()


def _spans(vectors: Sequence[torch.Tensor], low: int, high: int) -> Iterator[tuple[slice, torch.Tensor]]:
    # Parts of the concatenated vectors in [low, high): the slice in that interval, and the part.
    split = Listed(tuple(vector.numel() for vector in vectors))
    for number in meeting(split, low, high):
        start, stop = split.interval(number)
        first, last = max(start, low), min(stop, high)
        yield slice(first - low, last - low), vectors[number][first - start : last - start]


class TransferInPasses:
    """Passes of a tensor in parts, each on one rank (giver): in every pass a run of each part moves.

    All runs of a giver have the same length, so that all passes are the same exchange.

    ``count`` is the number of passes, ``runs`` the elements per pass of each giver, in partition order.
    """

    def __init__(self, givers: Decomposition, dtype: torch.dtype) -> None:
        self.givers, self.dtype = givers, dtype
        self._sizes = [givers.box(rank).volume for rank in givers.partition.ranks]
        most = max(1, PASS_NBYTES // (dtype.itemsize * len(self._sizes)))
        self.runs = Listed(tuple(min(size, most) for size in self._sizes))
        self.count = max(-(-size // most) for size in self._sizes)

    def run(self, giver: int, number: int) -> slice:
        """Elements of a giver that move in a pass. A part's last run may overlap earlier ones."""
        length = self.runs.lengths[giver]
        start = min(number * length, self._sizes[giver] - length)
        return slice(start, start + length)


def gather_whole(
    machine: Machine, givers: Decomposition, takers: Partition, part: torch.Tensor, name: str
) -> torch.Tensor:
    """Gather a tensor in parts on all takers; collective over the machine, blocking.

    The tensor moves in passes. For any size and number of ranks, the segment of a rank holds at most one MiB
    of received data, and one MiB of data staged for other nodes. One rank per node receives the data from
    other nodes, and its node's ranks get them from this rank. So do nodes without takers: there is
    one way, whoever wants the tensor.

    ``part`` is this rank's box; ranks that are no givers pass a tensor of the same type. The result is in new
    memory, on the device of ``part``; it has no elements on ranks that are no takers.
    """
    device, part = part.device, down(part)
    passes = TransferInPasses(givers, part.dtype)
    ranks = givers.partition.ranks
    mine = part.detach().reshape(-1) if givers.partition.active else part.new_empty(0)
    giving = ranks.index(machine.rank) if givers.partition.active else None
    whole = part.new_empty(givers.shape if takers.active else (0,))
    boxes = [whole[givers.slices(rank)] for rank in ranks] if takers.active else []
    # A box that is not contiguous is gathered into a vector, and copied to its place at the end.
    vectors = [b.view(-1) if b.is_contiguous() else b.new_empty(b.numel()) for b in boxes]
    title = f"{name} of shape {givers.shape}"
    # Ranks that give nothing are after the givers.
    everyone = tuple(dict.fromkeys((*ranks, *machine.ranks)))
    counts = [*passes.runs.lengths, *[0] * (len(everyone) - len(ranks))]
    gathered = Allgather(machine.segments, everyone, counts, word_dtype(part.dtype, title), title)
    try:
        for number in range(passes.count):
            if giving is not None:
                gathered.active[...] = as_words(mine[passes.run(giving, number)].contiguous().cpu())
            gathered.start()
            runs = as_tensor(gathered.wait(), part.dtype)
            for giver, vector in enumerate(vectors):
                vector[passes.run(giver, number)] = runs[slice(*passes.runs.interval(giver))]
    finally:
        gathered.close()
    for box, vector in zip(boxes, vectors, strict=True):
        if not box.is_contiguous():
            box.copy_(vector.view(box.shape))
    return up(whole, device)

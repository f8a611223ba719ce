"""Double-buffered all-to-alls: every rank has a block for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.segments.collectives.engine.alltoall_blocks import AlltoallBlocks
from distdl_rma.segments.collectives.engine.collective import Collective
from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count, check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.collectives.engine.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.manager import SegmentManager

_READY, _DONE = range(2)


class Alltoall(Collective):
    """A block from every rank to every rank: all write ``active``, start and wait, and read ``result``.

    ``active`` holds this rank's blocks for all ranks, one behind the other, in their order; ``result`` those
    that all ranks had for this one. On a node every rank loads its blocks from the others itself; across
    nodes some ranks of each hand on those of a share of its ranks, by MPI's ``Ialltoallv``, and store what
    comes to the ranks of their node.

    Parameters
    ----------
    manager, ranks, name
        As for every :class:`Collective`.
    count
        Elements of every block; or, for every rank, a sequence with the elements of its blocks for each,
        alike on all ranks. The memory is that of the longest operand and the longest result, on all ranks.
    dtype
        Any type of numpy without Python objects.

    Attributes
    ----------
    sends, receives
        Elements of the blocks in ``active`` and in ``result``.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[Sequence[int]],
        dtype: npt.DTypeLike = np.float32,
        name: str = "alltoall",
    ) -> None:
        site = CollectiveSite.checked(manager, ranks, name)
        layout, size = site.layout, len(site.layout.ranks)
        if isinstance(count, Sequence):
            check_lengths([0] * len(count), size, name)
            counts = tuple(check_lengths(row, size, name) for row in count)
        else:
            counts = ((check_count(count, name),) * size,) * size
        self.dtype = np.dtype(dtype)
        blocks = AlltoallBlocks(layout, counts)
        self.sends, self.receives = blocks.sends(layout.me), blocks.receives(layout.me)
        super().__init__(_ByNodes(site, blocks, self.dtype))


class _ByNodes(SteppedAlgorithm):
    def __init__(self, site: CollectiveSite, blocks: AlltoallBlocks, dtype: np.dtype[Any]) -> None:
        layout, me = site.layout, site.layout.me
        begin, terms = blocks.longest_operand, f"collective=Alltoall\ncounts={blocks.counts}"
        super().__init__(site, begin + blocks.longest_result, dtype, layout.same_share, terms)
        self.operands = tuple(vector[: sum(blocks.sends(me))] for vector in self.vectors)
        self.results = tuple(vector[begin : begin + sum(blocks.receives(me))] for vector in self.vectors)
        self._loads = [
            (at, source, blocks.in_result(rank, me))
            for at, rank in enumerate(layout.here)
            if (source := blocks.in_operand(rank, me)).start < source.stop
        ]
        # All ranks with the same share know whether any of them sends anything.
        self._crosses = blocks.crosses
        outgoing, incoming = blocks.outgoing(), blocks.incoming()
        self._sent = [sum(route.size for route in routes) for routes in outgoing]
        self._received = [sum(route.size for route in routes) for routes in incoming]
        # Which rank of the node, and where in its vector, in the order of the messages.
        routes = list(chain.from_iterable(outgoing))
        self._packs = [(self._at[r.source], blocks.in_operand(r.source, r.target)) for r in routes]
        self._gets = [route.size for route in routes if route.source != me]
        routes = list(chain.from_iterable(incoming))
        self._stores = [(self._at[r.target], blocks.in_result(r.source, r.target)) for r in routes]
        self._puts = [route.size for route in routes if route.target != me]

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        others, rows, mine = self.layout.others_here, self.rows[parity], self.vectors[parity]
        self.notify(_READY, others)
        yield from self.wait_for(_READY, others)
        for at, source, target in self._loads:
            if at == self._me:
                mine[target] = mine[source]
            else:
                self.load(mine[target], rows[at][source])
        if self._crosses:
            yield from self._exchange_across(rows)
        # Nobody writes its next operand before all have read this one, and no result is incomplete.
        self.notify(_DONE, others)
        yield from self.wait_for(_DONE, others)

    def _exchange_across(self, rows: list[Array]) -> Iterator[None]:
        # Sends what ranks of this node have for others, and stores what these get.
        sent = np.concatenate([rows[0][:0], *(rows[at][place] for at, place in self._packs)])
        received, itemsize = np.empty(sum(self._received), sent.dtype), sent.itemsize
        self.count_gets(len(self._gets), itemsize * sum(self._gets))
        request = self.between.comm.Ialltoallv(
            [sent.view(np.uint8), [itemsize * count for count in self._sent], MPI.BYTE],
            [received.view(np.uint8), [itemsize * count for count in self._received], MPI.BYTE],
        )
        yield from self.complete(request, sent.nbytes)
        begin = 0
        for at, place in self._stores:
            target = rows[at][place]
            target[...] = received[begin : begin + target.size]
            begin += target.size
        self.count_puts(len(self._puts), itemsize * sum(self._puts))

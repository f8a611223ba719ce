"""A double-buffered allreduce: all ranks get the result.

An allreduce of five ranks on two nodes, whose vectors are cut into two shares (see ``node_layout.py``)::

                     node 0: ranks 0, 1, 2                     node 1: ranks 3, 4
    on the node      0: first halves, 1: second halves         3: first halves, 4: second halves
    between nodes    0 <=> 3 and 1 <=> 4: each pair sums its share, a part each, and exchanges the results
    on the node      0 and 1 store them to 0, 1, 2             3 and 4 store them to 3, 4

A vector of a few KiB takes another way: all ranks push it to all (``all_push.py``), and each reduces all
vectors. On P ranks that is P times the arithmetic and P times the bytes, but one message in a row.

A call of torch.distributed does not come here, but has the same phases in ``torch_backend/inter_node.py``.
Between the nodes its leaders sum by themselves, in the order of the nodes. Here MPI does: in messages that
grow with the logarithm of the nodes instead of one to every node, but in an order that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.between_nodes import Stages, in_pieces, number_of_pieces, slices
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.node_layout import check_count
from distdl_rma.segments.collectives.reduction import Array, Element, Reduction, element_of
from distdl_rma.segments.collectives.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.large_arrays import copy
from distdl_rma.segments.manager import SegmentManager

# Phases of a step: all have written their vectors; the holders have stored their shares of the result.
_READY, _DONE = range(2)
# Up to so many bytes at each receiver, all ranks push their vectors to all instead of reducing a share each.
_ALL_PUSH_BYTES = 8 << 10
# With more ranks than these, one message to each is never the fastest way.
_ALL_PUSH_RANKS = 32
# Pieces whose sums are kept at a time: one on the node, one between nodes, one that is copied back.
_UNDER_WAY = 3


class Allreduce(Collective):
    """Reduction whose result replaces the operand in its buffer, on all ranks.

    The result is bitwise the same on all ranks and in every run. On a node each element is reduced by one
    rank, in the order of ``ranks``. 16-bit floats are reduced in float32 and rounded once. Between nodes MPI
    combines the sums of the nodes; MPI also decides what the minimum of a NaN is. Shares of 16 MiB and more
    travel between nodes in pieces. For more than two nodes, MPI's order of summation may depend on the length
    of a share or piece, but never on which rank comes first.

    Parameters
    ----------
    dtype
        float16 to 64, complex64 or 128, int8 to 64, uint8 to 64, bool, or the text ``"bfloat16"``. For
        bfloat16, ``active`` and ``result`` are uint16 arrays of its bits.
    op
        ``"sum"``, ``"mean"``, ``"prod"``, ``"min"``, ``"max"``; for the bits of integers and bool also
        ``"band"``, ``"bor"``, ``"bxor"``. Integers wrap around, as in numpy and torch. Integers have no mean,
        complex numbers no minimum and maximum, and bool no sum: the ``"max"`` of bool is whether any is true,
        its ``"min"`` or ``"prod"`` whether all are.
    one_round
        Whether up to 32 ranks push vectors of any size to each other, for low latency; otherwise they push
        small vectors only.
    divisor
        Divisor of a mean, at least 1; the number of ranks if None.

    Notes
    -----
    Interface document, sections 3.1 and 4.1; requirement A15.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> most = machine.group().allreduce(2, op="max")
    >>> most.active[:] = [machine.rank, 7]
    >>> most.start()
    >>> most.wait()
    array([1., 7.], dtype=float32)
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: DTypeLike | Element = np.float32,
        op: str = "sum",
        name: str = "allreduce",
        *,
        one_round: bool = False,
        divisor: int | None = None,
    ) -> None:
        self.element = element_of(dtype, repr(name))
        self.count, self.dtype, self.op = check_count(count, name), self.element.storage, op
        site = CollectiveSite.checked(manager, ranks, name)
        size = len(site.layout.ranks)
        reduction = Reduction(op, self.element, size if divisor is None else divisor, repr(name))
        pushes = all_push_is_better(size, self.count * self.dtype.itemsize, one_round)
        super().__init__((_ByAllPush if pushes else _AllreduceByNodes)(site, self.count, reduction))


def all_push_is_better(size: int, nbytes: int, asked: bool) -> bool:
    """Whether all ranks push their vectors to all: for small vectors, or if ``asked`` for low latency.

    >>> all_push_is_better(2, 8192, False), all_push_is_better(3, 8192, False)
    (True, False)
    """
    small = asked or nbytes * (size - 1) <= _ALL_PUSH_BYTES
    return size == 1 or (small and size <= _ALL_PUSH_RANKS)


class _ByAllPush(AllPush):
    """Every rank pushes its vector to all ranks; each reduces all vectors in the same order.

    Its step needs nobody else's help: what this rank owes the others, it has pushed in ``begin``. So no other
    wait has to advance it (``needs_progress``), which keeps a step of few microseconds off every list.
    """

    needs_progress = False

    def __init__(self, site: CollectiveSite, count: int, reduction: Reduction) -> None:
        manager, layout, name = site
        self.site = site
        terms = f"collective=Allreduce in one round\n{reduction.terms}"
        super().__init__(manager, layout.ranks, count, reduction.element.storage, name, terms)
        me = layout.ranks.index(layout.me)
        self.operands = self.results = tuple(vectors[me] for vectors in self.rows)
        # Looked up once, since a small step takes a few microseconds.
        self._reduce = tuple(reduction.bound(vectors, vectors[me]) for vectors in self.rows)
        self.broken = ""

    def begin(self, _step: int) -> None:
        """Push this rank's vector; steps are epochs."""
        self.push()

    def advance(self) -> bool:
        """Reduce once all vectors have arrived; return whether the step is complete, or broken."""
        step = self.epoch
        if self._waited != step:
            if not self.arrived():
                return False
            try:
                # Before the reduction, which is in place and must not run twice.
                self._waited = step
                self._reduce[step & 1]()
            except BaseException as error:
                self.broken = repr(error)
                raise
        return True

    def close(self) -> None:
        """Free the memory once all vectors have arrived."""
        # Other ranks may still write in a broken step, so its memory is not used again.
        if not self.broken:
            super().close()


class _Cut(NamedTuple):
    # The shares of a node's vectors that this rank reduces: all, in its own vector, in those of the others;
    # and the function that reduces them, which on several nodes goes piece by piece instead.
    shares: list[Array]
    mine: Array
    others: list[Array]
    reduce: Callable[[], object] | None


class _AllreduceByNodes(SteppedAlgorithm):
    """Some ranks of each node reduce a share each; ranks with the same share combine them between nodes.

    Large shares travel in pieces: while one piece is summed between nodes, the next piece is summed on the
    node, and the piece before is copied from node to node, or stored to the ranks of the node.
    """

    def __init__(self, site: CollectiveSite, count: int, reduction: Reduction) -> None:
        layout, element = site.layout, reduction.element
        share, number = layout.share(count), len(layout.nodes)
        size, terms = share.stop - share.start, f"collective=Allreduce\n{reduction.terms}"
        # Equal on all ranks, even if shares differ, or this rank has none.
        pieces = number_of_pieces(count * element.wide.itemsize // layout.shares, number)
        super().__init__(site, count, element.storage, layout.same_share, terms)
        self.reduction, self._share, self._elements = reduction, share, size
        # For even and odd steps the shares of all vectors, looked up once.
        self._cuts: dict[int, _Cut] = {}
        # The pieces of the share, and the part of each piece that each node sums.
        self._pieces = slices(size, pieces)
        self._splits = [Listed(Balanced(at.stop - at.start, number).lengths) for at in self._pieces]
        # MPI reads the vector itself if a rank is alone on its node.
        self._direct = len(layout.here) == 1 and element.exact
        # For the pieces under way, in the type of the reduction: the sums of this node, and this rank's part
        # of the sums of all nodes.
        whole, mine = self._splits[0].extent, self._splits[0].lengths[layout.my_node]
        across, ring = number > 1, min(pieces, _UNDER_WAY)
        sums = (ring if across and not self._direct else 0, whole)
        self._sums, self._parts = np.empty(sums, element.wide), np.empty((across * ring, mine), element.wide)

    def script(self, parity: int) -> Iterator[None]:
        layout = self.layout
        self.notify(_READY, layout.holders)
        if layout.my_share is not None:
            yield from self.wait_for(_READY, layout.here)
            if self._elements:
                loads = len(layout.here) - 1
                self.count_gets(loads, loads * self._elements * self.vectors[0].itemsize)
                yield from self._reduce_share(parity)
            self.notify(_DONE, layout.here)
        yield from self.wait_for(_DONE, layout.holders)

    def _reduce_share(self, parity: int) -> Iterator[None]:
        if parity not in self._cuts:
            self._cuts[parity] = self._cut(self.rows[parity])
        cut = self._cuts[parity]
        if cut.reduce is not None:
            cut.reduce()
        else:
            yield from in_pieces(map(self._combine, repeat(cut), range(len(self._pieces))))
        self._counters.puts += len(cut.others)
        self._counters.bytes_put += len(cut.others) * cut.mine.nbytes

    def _cut(self, rows: list[Array]) -> _Cut:
        shares = [row[self._share] for row in rows]
        mine, others = shares[self._me], [share for at, share in enumerate(shares) if at != self._me]
        one_node = len(self.layout.nodes) == 1
        reduce = self.reduction.bound(shares, mine, *others) if one_node else None
        return _Cut(shares, mine, others, reduce)

    def _combine(self, cut: _Cut, piece: int) -> Stages:
        # Every element is reduced on one node and copied to the others: bitwise the same on all. Memory for
        # the sums is kept: new pages would cost time in each step.
        where, split, element = self._pieces[piece], self._splits[piece], self.reduction.element
        if self._direct:
            sums = cut.mine[where]
        else:
            sums = self._sums[piece % _UNDER_WAY][: split.extent]
            self.reduction.partial([share[where] for share in cut.shares], sums)
        part = self._parts[piece % _UNDER_WAY][: split.lengths[self.layout.my_node]]
        script = self.between.reduce_scatter(sums, part, split.lengths, self.reduction.mpi)
        yield self.across(script, sums.nbytes)
        finished = part if element.exact else np.empty(part.size, element.storage)
        self.reduction.finish(part, finished)
        counts = [element.storage.itemsize * length for length in split.lengths]
        yield self.across(self.between.gather_all(finished, cut.mine[where], counts), finished.nbytes)
        for other in cut.others:
            copy(other[where], cut.mine[where])

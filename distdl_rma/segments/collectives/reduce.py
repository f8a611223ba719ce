"""Double-buffered reductions of which one rank gets the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count
from distdl_rma.segments.collectives.reduce_scatter import Reducescatter
from distdl_rma.segments.manager import SegmentManager


class Reduce(Reducescatter):
    """Reduction to one rank: all write ``active``, start and wait, and the root reads ``result``.

    The reduce-scatter whose only part is the root's: the ranks of a node reduce a share each and store it to
    the root, or for a tree of MPI's ``Ireduce`` that leads to the root's node. ``result`` has no elements
    on other ranks. Bitwise the same from run to run, and on one node what :class:`Allreduce` gives.

    Parameters
    ----------
    manager, ranks, name
        As for every :class:`Collective`; ``ranks`` in the order of summation.
    count
        Number of elements; 0 is legal.
    dtype, op
        As for :class:`Allreduce`.
    root
        Rank id of the root; the first of ``ranks`` if None.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: npt.DTypeLike | str = np.float32,
        op: str = "sum",
        root: int | None = None,
        name: str = "reduce",
    ) -> None:
        layout = CollectiveSite.checked(manager, ranks, name).layout
        self.root, number = layout.checked_root(root, name), check_count(count, name)
        counts = [number if rank == self.root else 0 for rank in layout.ranks]
        super().__init__(manager, ranks, counts, dtype, op, name)

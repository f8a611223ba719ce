"""Every rank's block with the elements around it."""

from __future__ import annotations

import torch

from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window, WindowSplit
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite, movements_through
from distdl_rma.ops.moves.redistribute import StagedMove
from distdl_rma.ops.window_gather import WindowGather


class HaloExchange(StagedMove):
    """What windows as wide as both halos read, where every element has a window of its own.

    The results of the ranks are overlapping parts of the padded tensor. ``width`` says how many elements
    before and behind a block, for each spatial dimension; mode and value as of :class:`WindowGather`.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        dtype: torch.dtype,
        width: tuple[tuple[int, int], ...],
        mode: str,
        value: float,
    ) -> None:
        stencil = Stencil(tuple(Window(a + b + 1, left=a, right=b) for a, b in width))
        self._gather = WindowGather(site, stencil, source, source, dtype, mode, value)
        gather = self._gather.movement
        # Where a rank keeps what it has, its result is memory of its own all the same.
        movements = [gather] if gather is not None else movements_through(site, [(source, source)], dtype)
        # In the padded tensor all is there: a window begins where its block does, and nothing sticks out.
        padded = {
            d: WindowSplit(source.splits[d], Window(a + b + 1), source.shape[d] + a + b)
            for d, (a, b) in enumerate(width, LEADING)
        }
        super().__init__(movements, dtype, source.with_splits(padded))

    def __call__(self, needs: GradientNeeds, x: torch.Tensor) -> torch.Tensor:
        """Own block and what is around it; blocking."""
        return self._gather.add_padding(super().__call__(needs, x))

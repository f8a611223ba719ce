"""Parameters and running statistics: from where ranks keep them to where the input is cut, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.movement import CallSite, Movement, movement_or_none

_BACK = "batch statistics"


class KeptValues:
    """Values that vary along some dimensions of the input, ``dims``; kept whole on every rank, or cut.

    For ranks that have a part of the input; local to make. What travels has memory from its first use on.
    ``as_kept`` says whether this rank uses what it keeps.
    """

    def __init__(
        self, site: CallSite, source: Decomposition, dims: tuple[int, ...], store: Decomposition
    ) -> None:
        self._site, self._shape = site, store.shape
        P_x, rank = source.partition, site.machine.rank
        splits = tuple(source.splits[d] for d in dims)
        whole = all(axis is None for axis in store.axes)
        # This rank's part of values that are whole where the input is cut.
        self._part: tuple[slice, ...] | None = None
        # Where they are and where they are used, among ranks with the same part of the rest of the input.
        self._ends: tuple[Decomposition, Decomposition] | None = None
        if whole and any(split.parts > 1 for split in splits):
            self._part = tuple(slice(*source.box(rank).bounds[d]) for d in dims)
        elif not whole and splits != store.splits:
            index = P_x.index_of(rank)
            line = P_x.slab({d: i for d, i in enumerate(index) if store.axes[d] is None})
            kept, used = (Decomposition(line, cut, store.axes) for cut in (store.splits, splits))
            self._ends = kept, used
        self.as_kept = self._part is None and self._ends is None
        self._movements: dict[tuple[str, torch.dtype], Movement | None] = {}

    def to_input(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Values, by name, cut as the input is; differentiable, blocking where they travel."""
        if self._part is not None:
            return values[self._part]
        movement = self._movement(key, values.dtype)
        return values if movement is None else movement(values, values.requires_grad)

    def to_store(self, values: torch.Tensor) -> torch.Tensor:
        """Values from where the input is cut to where they are kept; blocking where they travel.

        Where they are whole, zeros beside this rank's part.
        """
        if self._part is not None:
            whole = values.new_zeros(self._shape)
            whole[self._part] = values
            return whole
        movement = self._movement(_BACK, values.dtype)
        return values if movement is None else movement(values)

    def connect(self, parameters: Mapping[str, torch.dtype], back: bool) -> None:
        """Exchange addresses for the values of some names and types, and for the way back; blocking."""
        ways = [*parameters.items(), *([(_BACK, torch.float64)] if back else [])]
        for movement in (self._movement(key, dtype) for key, dtype in ways):
            if movement is not None:
                movement.connect()

    def _movement(self, key: str, dtype: torch.dtype) -> Movement | None:
        if self._ends is None:
            return None
        if (key, dtype) not in self._movements:
            kept, used = self._ends
            ends = (used, kept) if key == _BACK else (kept, used)
            self._movements[key, dtype] = movement_or_none(self._site, *ends, dtype, key)
        return self._movements[key, dtype]

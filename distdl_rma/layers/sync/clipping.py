"""Norm of gradients whose parts lie on several ranks, and clipping by it.

Each rank takes the norm of its own gradients, one allgather shows it to all ranks, and every rank takes the
norm of these norms: the same number. Each gradient counts once: ``GradientSync`` passes those that this rank
is the first to hold. The same message carries whether some rank has a problem, and by which norm and limit
the rank clips: ranks that clip by different norms would drift apart without an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import ConfigurationError, MismatchError, ProtocolError
from distdl_rma.layers.checks.model_calls import by_ranks
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

_TITLE = "the norm of gradients"


class GradientNorms:
    """Norms over all ranks of a machine, in float64, equal on all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rows: Allgather | None = None

    def of(
        self,
        gradients: Sequence[torch.Tensor | None],
        norm_type: float,
        unsummed: bool = False,
        max_norm: float = math.inf,
    ) -> torch.Tensor:
        """Norm of the given tensors of all ranks together; collective over the machine, blocking.

        All ranks raise if gradients of one are ``unsummed``, or if their ``norm_type`` or ``max_norm``, by
        which they will clip, is invalid or differs.
        """
        order, limit, problem, norm = _number(norm_type), _number(max_norm), "", 0.0
        mine = [gradient.detach() for gradient in gradients if gradient is not None and gradient.numel()]
        if not order > 0:
            problem = f"norm_type must be positive, got {norm_type!r}"
        elif math.isnan(limit):
            problem = f"max_norm must be a number, got {max_norm!r}"
        elif mine:
            # Like torch, by the magnitudes of complex numbers.
            mine = [g.abs() if g.is_complex() else g for g in mine]
            found = [torch.linalg.vector_norm(g, order, dtype=torch.float64) for g in mine]
            # One copy from a device.
            norm = torch.linalg.vector_norm(torch.stack(found), order).item()
        segments, ranks = self._machine.segments, self._machine.ranks
        row = norm, order, limit, bool(problem), unsummed
        if self._rows is None:
            self._rows = Allgather(segments, ranks, len(row), np.float64, _TITLE)
        norms, orders, limits, problems, others = self._rows(row).reshape(-1, len(row)).T.tolist()
        if any(problems):
            words = gather_words(segments, problem, _TITLE)
            rank = next(rank for rank, its in words.items() if its)
            raise ConfigurationError(f"{_TITLE}: rank {rank}: {words[rank]}")
        for what, values in (("norm_type", orders), ("max_norm", limits)):
            if len({*values}) > 1:
                texts = by_ranks(dict(zip(ranks, map(str, values), strict=True)))
                raise MismatchError(f"{_TITLE}: {what} must be the same on all ranks: {texts}")
        if any(others):
            # Ranks may differ in this flag, since they collect garbage at different times.
            raise ProtocolError(f"{_TITLE}: those from no_sync() are summed in the next backward")
        return torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), order)

    def close(self) -> None:
        """Release the memory; local, idempotent."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None


def _number(value: Any) -> float:
    # NaN for what is no number.
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan

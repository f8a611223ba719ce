"""Norm of gradients whose parts lie on several ranks, and clipping by it.

Each rank adds up powers of its own gradients, one allreduce adds those of all ranks, and every rank gets the
same number. Each gradient counts once: ``GradientSync`` passes those that this rank is the first to hold. The
same message carries whether some rank has a problem, and the order of the norm as words that must be equal:
ranks that clip by different norms would drift apart without an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import ConfigurationError, DistdlError, MismatchError, ProtocolError
from distdl_rma.layers.checks.model_calls import by_ranks
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import are_equal, gather_words, words_of
from distdl_rma.segments.machine import Machine


class GradientNorms:
    """Norms over all ranks of a machine, in float64, equal on all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._totals: dict[str, Allreduce] = {}

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
        order, limit, problem, norms = _number(norm_type), _number(max_norm), "", []
        if not order > 0:
            problem = f"norm_type must be positive, got {norm_type!r}"
        elif math.isnan(limit):
            problem = f"max_norm must be a number, got {max_norm!r}"
        else:
            mine = [gradient.detach() for gradient in gradients if gradient is not None and gradient.numel()]
            # Like torch, by the magnitudes of complex numbers.
            mine = [g.abs() if g.is_complex() else g for g in mine]
            found = [torch.linalg.vector_norm(g, order, dtype=torch.float64) for g in mine]
            # One copy from a device.
            norms = torch.stack(found).tolist() if found else []
        # Not by floats of Python, which raise on this rank alone where a power overflows.
        power = 0.0 if order == math.inf else float((torch.tensor(norms, dtype=torch.float64) ** order).sum())
        # The ranks compare the orders here, before a maximum.
        words = words_of(f"{order} {limit}")
        powers, problems, others, *sums = self._total("sum", power, bool(problem), unsummed, *words)
        if problems or not are_equal(sums, len(self._machine.ranks)):
            raise self._refusal(problem, order, limit)
        if others:
            # Ranks may differ in this flag, since they collect garbage at different times.
            raise ProtocolError("the norm of gradients: those from no_sync() are summed in the next backward")
        if order < math.inf:
            return torch.tensor(powers, dtype=torch.float64) ** (1.0 / order)
        # A maximum may lose NaN, so a flag carries it.
        largest = max((norm for norm in norms if not math.isnan(norm)), default=0.0)
        largest, strange = self._total("max", largest, any(map(math.isnan, norms)))
        return torch.tensor(math.nan if strange else largest, dtype=torch.float64)

    def close(self) -> None:
        """Release the memory; local, idempotent."""
        for total in self._totals.values():
            total.close()
        self._totals.clear()

    def _refusal(self, problem: str, order: float, limit: float) -> DistdlError:
        words = gather_words(self._machine.segments, [problem, str(order), str(limit)], "norm of gradients")
        for rank, (its, _, _) in words.items():
            if its:
                return ConfigurationError(f"the norm of gradients: rank {rank}: {its}")
        orders, limits = ({rank: row[at] for rank, row in words.items()} for at in (1, 2))
        what, texts = ("norm_type", orders) if len({*orders.values()}) > 1 else ("max_norm", limits)
        return MismatchError(
            f"the norm of gradients: {what} must be the same on all ranks: {by_ranks(texts)}"
        )

    def _total(self, op: str, *values: float) -> list[float]:
        total = self._totals.get(op)
        if total is None:
            segments, ranks = self._machine.segments, self._machine.ranks
            name = f"norm of gradients ({op})"
            total = self._totals[op] = Allreduce(segments, ranks, len(values), np.float64, op, name)
        found: list[float] = total(values).tolist()
        return found


def _number(value: Any) -> float:
    # NaN for what is no number.
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan

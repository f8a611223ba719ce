"""Norm of gradients whose parts lie on several ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.allreduce import Allreduce


class GradientNorms:
    """Norms over all ranks of a machine, in float64, equal on all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._totals: dict[float, Allreduce] = {}

    def of(
        self, gradients: Sequence[torch.Tensor | None], norm_type: float, unsummed: bool = False
    ) -> torch.Tensor:
        """Norm of the given tensors of all ranks together; collective over the machine, blocking.

        ``unsummed`` says that gradients of this rank are not summed yet: then all ranks raise.
        """
        order = float(norm_type)
        if not order > 0:
            raise ConfigurationError(f"norm_type must be positive, got {norm_type!r}")
        mine = [gradient.detach() for gradient in gradients if gradient is not None and gradient.numel()]
        # Like torch, by the magnitudes of complex numbers.
        mine = [g.abs() if g.is_complex() else g for g in mine]
        norms = [float(torch.linalg.vector_norm(g, order, dtype=torch.float64)) for g in mine]
        if order == math.inf:
            # A maximum may lose NaN, so a flag carries it.
            largest = max((norm for norm in norms if not math.isnan(norm)), default=0.0)
            found = largest, float(any(map(math.isnan, norms))), float(unsummed)
            largest, strange = self._total("max", order, *found)
            return torch.tensor(math.nan if strange else largest, dtype=torch.float64)
        # Not by floats of Python, which raise on this rank alone where a power overflows.
        power = float((torch.tensor(norms, dtype=torch.float64) ** order).sum())
        (powers,) = self._total("sum", order, power, float(unsummed))
        return torch.tensor(powers, dtype=torch.float64) ** (1.0 / order)

    @staticmethod
    def scale(gradients: Sequence[torch.Tensor | None], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients in place, as torch does, if their norm is above ``max_norm``."""
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            if gradient is not None:
                wide = gradient.dtype in (torch.float64, torch.complex128)
                gradient.mul_(factor.to(torch.float64 if wide else torch.float32))

    def close(self) -> None:
        """Release the memory; local, idempotent."""
        for total in self._totals.values():
            total.close()
        self._totals.clear()

    def _total(self, op: str, order: float, *values: float) -> tuple[float, ...]:
        total = self._totals.get(order)
        if total is None:
            # The name is compared between ranks, so that different orders raise.
            name = f"norm of order {order:g} of the gradients"
            segments, ranks = self._machine.segments, self._machine.ranks
            total = Allreduce(segments, ranks, len(values), np.float64, op, name)
            self._totals[order] = total
        *found, unsummed = total(values).tolist()
        if unsummed:
            # Ranks may differ in this flag, since they collect garbage at different times.
            raise ProtocolError("the norm of gradients: gradients from no_sync are not summed yet")
        return tuple(found)

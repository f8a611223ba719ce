"""Norm of gradients whose parts lie on several ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from distdl_rma.checks.calls import by_ranks
from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import ConfigurationError, MismatchError, ProtocolError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.machine import Machine
from distdl_rma.segments.collectives.allreduce import Allreduce

# Codes of numbers that must be equal; float64 adds their squares exactly.
_CODES = 1 << 20


class GradientNorms:
    """Norms over all ranks of a machine, in float64, equal on all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._totals: dict[float, Allreduce] = {}

    def of(
        self,
        gradients: Sequence[torch.Tensor | None],
        norm_type: float,
        unsummed: bool = False,
        max_norm: float = math.inf,
    ) -> torch.Tensor:
        """Norm of the given tensors of all ranks together; collective over the machine, blocking.

        All ranks raise if gradients of one are ``unsummed``, or if their ``max_norm`` differs, by which they
        will clip.
        """
        order = float(norm_type)
        if not order > 0:
            raise ConfigurationError(f"norm_type must be positive, got {norm_type!r}")
        mine = [gradient.detach() for gradient in gradients if gradient is not None and gradient.numel()]
        # Like torch, by the magnitudes of complex numbers.
        mine = [g.abs() if g.is_complex() else g for g in mine]
        norms = [float(torch.linalg.vector_norm(g, order, dtype=torch.float64)) for g in mine]
        code = fingerprint(float(max_norm)) % _CODES
        if order == math.inf:
            # A maximum may lose NaN, so a flag carries it.
            largest = max((norm for norm in norms if not math.isnan(norm)), default=0.0)
            found = largest, any(map(math.isnan, norms)), code, -code, unsummed
            largest, strange, most, negative = self._total("max", order, *found)
            self._compare(most == -negative, max_norm)
            return torch.tensor(math.nan if strange else largest, dtype=torch.float64)
        # Not by floats of Python, which raise on this rank alone where a power overflows.
        power = float((torch.tensor(norms, dtype=torch.float64) ** order).sum())
        powers, codes, squares = self._total("sum", order, power, code, code**2, unsummed)
        # As in losses: codes are equal if and only if this holds.
        self._compare(int(squares) * len(self._machine.ranks) == int(codes) ** 2, max_norm)
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

    def _compare(self, equal: bool, max_norm: float) -> None:
        if not equal:
            texts = gather_words(self._machine.segments, str(float(max_norm)), "clip_grad_norm_")
            raise MismatchError(f"clip_grad_norm_: max_norm must be the same on all ranks: {by_ranks(texts)}")

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

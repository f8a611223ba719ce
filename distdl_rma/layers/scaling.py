"""Normalisation of a local tensor by statistics of the global one, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distdl_rma.layers.autograd import first_derivative
from distdl_rma.layers.cells import Band
from distdl_rma.layers.statistics import Statistics, inner
from distdl_rma.layers.tensors import sum_dtype
from distdl_rma.machine import Machine

__all__ = ["Job", "normalise", "widened"]


@dataclass(frozen=True)
class Job:
    """One call of a normalisation: by which statistics, and what its backward does.

    Parameters
    ----------
    machine
        The machine.
    statistics
        Cells of the call, and the sums of its backward.
    mean, variance
        Values that broadcast to the cells, in float64.
    eps
        Added to the variance.
    depends
        Whether mean and variance are those of the input, and some rank needs its gradient.
    place
        Puts the gradient of a parameter, by name, where it is wanted.
    """

    machine: Machine
    statistics: Statistics
    mean: torch.Tensor
    variance: torch.Tensor
    eps: float
    depends: bool
    place: Callable[[str, torch.Tensor], torch.Tensor]


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    anchor: torch.Tensor | None,
    job: Job,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of the local tensor, in the type of ``x``.

    The backward knows that mean and variance depend on the input: one exchange of two sums per cell.
    """
    y: torch.Tensor = _Normalise.apply(x, weight, bias, anchor, job)  # type: ignore[no-untyped-call]
    return y


def widened(x: torch.Tensor) -> torch.Tensor:
    """Tensor in the type to compute in: float32 for shorter ones."""
    return x.to(sum_dtype(x.dtype))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        job: Job,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.job, ctx.machine = job, job.machine
        with job.machine.trace.span("scale", job.statistics.name):
            wide = widened(x)
            y = torch.empty_like(wide)
            for band in job.statistics.cells.bands:
                _Part(job, band, wide, weight).scale(bias, band.of(y))
            return y.to(x.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        job, statistics = ctx.job, ctx.job.statistics
        phase = job.machine.trace.phases(statistics.name, backward=True)
        wide, d_y = widened(x), widened(gradient)
        with torch.autocast("cpu", enabled=False):
            with phase("local"):
                parts = [_Backward(job, band, wide, weight, d_y) for band in statistics.cells.bands]
                pair = torch.zeros(2, *statistics.cells.shape, dtype=torch.float64)
                if job.depends:
                    for part in parts:
                        part.write_sums(pair)
            arrive = statistics.sum(pair) if job.depends else None
            with phase("scale"):
                d_weight, d_bias = (
                    job.place(name, _joined([part.of_parameter(name) for part in parts], weight))
                    if needed
                    else None
                    for name, needed in zip(("weight", "bias"), ctx.needs_input_grad[1:3], strict=True)
                )
                d_x = torch.empty_like(wide) if ctx.needs_input_grad[0] else None
                if d_x is not None:
                    for part in parts:
                        part.scale_gradient(part.band.of(d_x))
            if arrive is not None:
                means = arrive() / statistics.total
                if d_x is not None:
                    with phase("fuse"):
                        for part in parts:
                            part.add_means(part.band.of(d_x), means)
        return None if d_x is None else d_x.to(x.dtype), d_weight, d_bias, None, None


def _joined(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    # Bands are channels side by side.
    whole = parts[0] if len(parts) == 1 else torch.cat([weight.new_empty(0), *parts])
    return whole.to(weight.dtype)


class _Part:
    """What forward and backward both derive for one band of the local tensor."""

    def __init__(self, job: Job, band: Band, x: torch.Tensor, weight: torch.Tensor | None) -> None:
        self.job, self.band, self.layout = job, band, job.statistics.layout
        view = band.of(x)
        self.shape, self.dtype = view.shape, view.dtype
        # Where parameters vary within a cell everywhere, there are as many products of them as elements.
        self.elementwise = not self.layout.local
        self.inverse = (band.of_cells(job.variance) + job.eps).rsqrt()
        mean = band.of_cells(job.mean)
        rounded = mean.to(self.dtype)
        # The mean is taken off before anything is multiplied; its rounding error is made up for afterwards.
        self.rest = mean - rounded
        self.centred = view - rounded if job.statistics.centred else view
        self.weight = self.column(weight)

    def column(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Parameter shaped to broadcast to the view of the band."""
        if parameter is None:
            return None
        values = self.band.of(parameter, 0).to(self.dtype if self.elementwise else torch.float64)
        return values.reshape([n if d in self.layout.weighted else 1 for d, n in enumerate(self.shape)])

    def standardise(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Elements with mean 0 and variance 1."""
        shift = (-self.rest * self.inverse).to(self.dtype)
        return torch.addcmul(shift, self.centred, self.inverse.to(self.dtype), out=out)

    def scale(self, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the output of the band."""
        b = self.column(bias)
        if self.elementwise and self.weight is not None:
            self.standardise(out).mul_(self.weight)
            if b is not None:
                out.add_(b)
            return
        scale = self.inverse if self.weight is None else self.inverse * self.weight
        shift = -self.rest * scale if b is None else b - self.rest * scale
        torch.addcmul(shift.to(self.dtype), self.centred, scale.to(self.dtype), out=out)


class _Backward(_Part):
    """Sums of the backward of one band, and what is made of them."""

    def __init__(
        self, job: Job, band: Band, x: torch.Tensor, weight: torch.Tensor | None, d_y: torch.Tensor
    ) -> None:
        super().__init__(job, band, x, weight)
        self.d_y = band.of(d_y)
        # Sums of the gradient, and of its product with the standardised input, where parameters are the same.
        if self.elementwise:
            self.total, self.product = self.d_y, self.d_y * self.standardise()
        else:
            self.total = self.d_y.sum(self.layout.local, keepdim=True, dtype=torch.float64)
            product = inner(self.d_y, self.centred, self.layout.local)
            self.product = (product - self.rest * self.total) * self.inverse

    def of_parameter(self, name: str) -> torch.Tensor:
        """Gradient of ``weight`` or ``bias``."""
        rows = self.product if name == "weight" else self.total
        alone = self.layout.alone(rows.dim())
        values = rows.sum(alone) if alone else rows
        extents = [self.shape[d] for d in self.layout.weighted]
        return values.reshape(extents if self.band.channels is None else -1)

    def write_sums(self, pair: torch.Tensor) -> None:
        """The two sums of each cell, weights included."""
        dims = [d for d in self.layout.reduced if d in self.layout.weighted]
        for rows, sums in zip((self.total, self.product), pair, strict=True):
            weighted = rows if self.weight is None else rows * self.weight
            total = weighted.sum(dims, keepdim=True, dtype=torch.float64) if dims else weighted
            self.band.of_cells(sums).copy_(total)

    def scale_gradient(self, out: torch.Tensor) -> None:
        """Write the gradient of the input as if mean and variance were constants."""
        if self.elementwise and self.weight is not None:
            torch.mul(self.d_y, self.weight, out=out).mul_(self.inverse.to(self.dtype))
        else:
            scale = self.inverse if self.weight is None else self.inverse * self.weight
            torch.mul(self.d_y, scale.to(self.dtype), out=out)

    def add_means(self, out: torch.Tensor, means: torch.Tensor) -> None:
        """Add what comes by way of mean and variance."""
        total, product = (self.band.of_cells(values) for values in means)
        slope = -self.inverse.square() * product
        out.addcmul_(self.centred, slope.to(self.dtype))
        if self.job.statistics.centred:
            out.sub_((self.inverse * total + self.rest * slope).to(self.dtype))

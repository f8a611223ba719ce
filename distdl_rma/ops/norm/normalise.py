"""Normalisation of a local tensor by statistics of the global one, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distdl_rma.machine import Machine
from distdl_rma.ops.autograd import first_derivative
from distdl_rma.ops.norm.statistic_groups import ChannelRun
from distdl_rma.ops.norm.statistics import Shifted, Statistics, sums_and_products
from distdl_rma.ops.result_pool import result_like
from distdl_rma.ops.tensors import no_autocast, sum_dtype


@dataclass(frozen=True)
class NormCall:
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
    job: NormCall,
    shifted: Shifted | None,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of the local tensor, in the type of ``x``.

    The backward knows that mean and variance depend on the input: one exchange of two sums per cell. Where
    the statistics have left the input shifted, that becomes the output.
    """
    y: torch.Tensor = _Normalise.apply(x, weight, bias, anchor, job, shifted)  # type: ignore[no-untyped-call]
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
        job: NormCall,
        shifted: Shifted | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with job.machine.trace.span("scale", job.statistics.name):
            bands = job.statistics.cells.bands
            if shifted is None:
                wide = widened(x)
                y = result_like(wide)
                parts = [_RunState(job, band, y, weight) for band in bands]
            else:
                wide, y = None, shifted.values
                parts = [
                    _RunState(job, band, y, weight, by) for band, by in zip(bands, shifted.by, strict=True)
                ]
            for part in parts:
                part.scale(wide, bias, y)
        ctx.job, ctx.parts, ctx.machine = job, parts, job.machine
        return y.to(x.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        job, statistics = ctx.job, ctx.job.statistics
        phase = job.machine.trace.phases(statistics.name, backward=True)
        wide, d_y = widened(x), widened(gradient)
        with no_autocast():
            with phase("local"):
                parts = [_RunGradient(part, wide, d_y) for part in ctx.parts]
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
                d_x = result_like(wide) if ctx.needs_input_grad[0] else None
                if d_x is not None:
                    for part in parts:
                        part.prepare(d_x, job.depends)
            if arrive is not None:
                means = arrive() / statistics.total
                if d_x is not None:
                    with phase("fuse"):
                        for part in parts:
                            part.finish(d_x, means)
        return None if d_x is None else d_x.to(x.dtype), d_weight, d_bias, None, None, None


def _joined(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    # Bands are channels side by side.
    whole = parts[0] if len(parts) == 1 else torch.cat([weight.new_empty(0), *parts])
    return whole.to(weight.dtype)


class _RunState:
    """What forward and backward both need of one band: values per cell and per channel."""

    def __init__(
        self,
        job: NormCall,
        band: ChannelRun,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        shift: torch.Tensor | None = None,
    ) -> None:
        self.band, self.layout, self.centred = band, job.statistics.layout, job.statistics.centred
        self.shape, self.dtype = band.of(x).shape, x.dtype
        # Where parameters vary within a cell everywhere, there are as many products of them as elements.
        self.elementwise = not self.layout.local
        self.inverse = (band.of_cells(job.variance) + job.eps).rsqrt_()
        mean = band.of_cells(job.mean)
        # Something near to the mean is taken off before anything is multiplied, the rest of it afterwards.
        self.shift = mean.to(self.dtype) if shift is None else shift
        self.rest = mean - self.shift
        self.weight = None if weight is None else self.column(weight)
        # With the weight, where that makes one value per cell and channel.
        self.factor = self.inverse
        if self.weight is not None and not self.elementwise:
            self.factor = self.inverse * self.weight
        self.rounded_factor = self.factor.to(self.dtype)

    def column(self, parameter: torch.Tensor) -> torch.Tensor:
        """Parameter shaped to broadcast to the view of the band."""
        values = self.band.of(parameter, 0).to(self.dtype if self.elementwise else torch.float64)
        return values.reshape([n if d in self.layout.weighted else 1 for d, n in enumerate(self.shape)])

    def shifted(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Elements without the shift, in ``out`` if there is one."""
        return torch.sub(x, self.shift, out=out) if self.centred else x

    def standardise(self, x: torch.Tensor, out: torch.Tensor, offset: torch.Tensor | None = None) -> None:
        """Write shifted elements, with mean 0 and times the factor, plus an offset."""
        if self.centred:
            rest = self.rest * self.factor
            offset = rest.neg_() if offset is None else offset - rest
        torch.mul(x, self.rounded_factor, out=out)
        if offset is not None:
            out.add_(offset.to(self.dtype))

    def scale(self, x: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Write the output of the band, where the shifted input is if that is not given."""
        out = self.band.of(y)
        view = out if x is None else self.shifted(self.band.of(x), out)
        offset = None if bias is None else self.column(bias)
        if not self.elementwise:
            self.standardise(view, out, offset)
            return
        self.standardise(view, out)
        if self.weight is not None:
            out.mul_(self.weight)
        if offset is not None:
            out.add_(offset)


class _RunGradient:
    """Sums of the backward of one band, and what is made of them."""

    def __init__(self, part: _RunState, x: torch.Tensor, d_y: torch.Tensor) -> None:
        self.part, self.x, self.d_y = part, part.band.of(x), part.band.of(d_y)
        local = part.layout.local
        # Sums of the gradient, and of its product with the standardised input, where parameters are the same.
        if part.elementwise:
            standard = torch.empty_like(self.x)
            part.standardise(part.shifted(self.x, standard), standard)
            self.total, self.product = self.d_y, standard.mul_(self.d_y)
        else:
            self.total, product = sums_and_products(self.d_y, self.x, part.shift, local)
            self.product = product.addcmul_(part.rest, self.total, value=-1).mul_(part.inverse)

    def of_parameter(self, name: str) -> torch.Tensor:
        """Gradient of ``weight`` or ``bias``."""
        rows = self.product if name == "weight" else self.total
        part = self.part
        alone = part.layout.alone(rows.dim())
        values = rows.sum(alone) if alone else rows
        extents = [part.shape[d] for d in part.layout.weighted]
        return values.reshape(extents if part.band.channels is None else -1)

    def write_sums(self, pair: torch.Tensor) -> None:
        """The two sums of each cell, weights included."""
        part = self.part
        dims = [d for d in part.layout.reduced if d in part.layout.weighted]
        for rows, sums in zip((self.total, self.product), pair, strict=True):
            weighted = rows if part.weight is None else rows * part.weight
            total = weighted.sum(dims, keepdim=True, dtype=torch.float64) if dims else weighted
            part.band.of_cells(sums).copy_(total)

    def prepare(self, d_x: torch.Tensor, depends: bool) -> None:
        """Write what is needed of the input; if mean and variance are constants, all of its gradient."""
        part, out = self.part, self.part.band.of(d_x)
        if not depends:
            torch.mul(self.d_y, part.rounded_factor, out=out)
            if part.elementwise and part.weight is not None:
                out.mul_(part.weight)
        else:
            part.shifted(self.x, out)

    def finish(self, d_x: torch.Tensor, means: torch.Tensor) -> None:
        """Make the gradient of the input of that, of the gradient of the output, and of the two means."""
        part, out = self.part, self.part.band.of(d_x)
        total, product = map(part.band.of_cells, means)
        slope = product * -part.inverse
        if not part.elementwise:
            total, slope = total * part.inverse, slope.mul_(part.inverse)
        torch.mul(out if part.centred else self.x, slope.to(part.dtype), out=out)
        if not part.elementwise:
            out.addcmul_(self.d_y, part.rounded_factor)
        elif part.weight is not None:
            out.addcmul_(self.d_y, part.weight)
        else:
            out.add_(self.d_y)
        if part.centred:
            out.sub_(torch.addcmul(total, part.rest, slope).to(part.dtype))
        if part.elementwise:
            out.mul_(part.rounded_factor)

"""Normalisation of a local tensor by statistics of the global one, and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdl_rma.ops.core.autograd import first_derivative
from distdl_rma.ops.core.tensors import no_autocast, result_like, sum_dtype
from distdl_rma.ops.norm.statistic_groups import ChannelRun
from distdl_rma.ops.norm.statistics import Shifted, Statistics, sums_and_products

# Puts the gradient of a parameter, by name, where it is wanted.
Fill = Callable[[str, Tensor], Tensor]


class NormCall(NamedTuple):
    """One call of a normalisation: by what mean and variance, in float64, and what its backward does."""

    statistics: Statistics
    mean: Tensor
    variance: Tensor
    eps: float
    # Whether mean and variance are those of the input, and some rank needs its gradient.
    depends: bool
    fill: Fill | None


class LocalNorm(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of the local tensor, in the type of ``x``.

    The backward knows that mean and variance depend on the input: one exchange of two sums per group. Where
    the statistics have left the input shifted, that becomes the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        _anchor: Tensor | None,
        call: NormCall,
        shifted: Shifted | None,
    ) -> Tensor:
        """Output of the local tensor; local."""
        ctx.save_for_backward(x, weight)
        statistics = call.statistics
        with statistics.trace.span("scale", statistics.name):
            local = statistics.groups.runs
            if shifted is None:
                wide = x.to(sum_dtype(x.dtype))
                y = result_like(wide)
                runs = [_Run(call, run, y, weight, None) for run in local]
            else:
                wide, (y, by) = None, shifted
                runs = [_Run(call, run, y, weight, shift) for run, shift in zip(local, by, strict=True)]
            for run in runs:
                run.scale(wide, bias, y)
        ctx.call, ctx.runs, ctx.machine = call, runs, statistics.machine
        return y.to(x.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Gradients; blocking where those of the input depend on other ranks."""
        (x, weight), call, runs = ctx.saved_tensors, ctx.call, ctx.runs
        statistics, fill = call.statistics, call.fill
        phase = statistics.trace.phases(statistics.name, backward=True)
        wide, d_y = (t.to(sum_dtype(t.dtype)) for t in (x, d_y))
        with no_autocast():
            with phase("local"):
                gradients = [_RunGradient(run, wide, d_y) for run in runs]
                pair = torch.zeros(2, *statistics.groups.shape, dtype=torch.float64)
                if call.depends:
                    for part in gradients:
                        part.write_sums(pair)
            arrive = statistics.sum(pair) if call.depends else None
            with phase("scale"):
                of_parameters: list[Tensor | None] = [None, None]
                for at, name in enumerate(("weight", "bias")):
                    if ctx.needs_input_grad[1 + at]:
                        # Runs are channels side by side.
                        parts = [part.of_parameter(name) for part in gradients]
                        whole = parts[0] if len(parts) == 1 else torch.cat([weight.new_empty(0), *parts])
                        whole = whole.to(weight.dtype)
                        of_parameters[at] = whole if fill is None else fill(name, whole)
                d_x = result_like(wide) if ctx.needs_input_grad[0] else None
                if d_x is not None:
                    for part in gradients:
                        part.prepare(d_x, call.depends)
            if arrive is not None:
                means = arrive() / statistics.total
                if d_x is not None:
                    with phase("fuse"):
                        for part in gradients:
                            part.finish(d_x, means)
        return None if d_x is None else d_x.to(x.dtype), *of_parameters, None, None, None


class _Run:
    """What forward and backward both need of one run: values per group and per channel.

    With weights that are the same along all that is reduced beside the channels (``elementwise`` is false),
    ``factor = weight / sqrt(variance + eps)`` is one value per group and channel. In layer norm it would
    have as many values as there are elements: there the two are multiplied one after the other.
    """

    def __init__(
        self, call: NormCall, run: ChannelRun, x: Tensor, weight: Tensor | None, shift: Tensor | None
    ) -> None:
        self.run, self.axes, self.centred = run, call.statistics.axes, call.statistics.centred
        self.shape, self.dtype = run.of(x).shape, x.dtype
        self.elementwise = not self.axes.uniform
        self.inverse = (run.of_groups(call.variance) + call.eps).rsqrt_()
        mean = run.of_groups(call.mean)
        # Something near to the mean is taken off before anything is multiplied, the rest of it afterwards.
        self.shift = mean.to(self.dtype) if shift is None else shift
        self.rest = mean - self.shift
        self.weight = None if weight is None else self.column(weight)
        self.factor = self.inverse
        if self.weight is not None and not self.elementwise:
            self.factor = self.inverse * self.weight
        self.rounded_factor = self.factor.to(self.dtype)

    def column(self, parameter: Tensor) -> Tensor:
        """Parameter shaped to broadcast to the view of the run."""
        values = self.run.of(parameter, 0).to(self.dtype if self.elementwise else torch.float64)
        return values.reshape([n if d in self.axes.weighted else 1 for d, n in enumerate(self.shape)])

    def shifted(self, x: Tensor, out: Tensor) -> Tensor:
        """Elements without the shift, in ``out`` if there is one."""
        return torch.sub(x, self.shift, out=out) if self.centred else x

    def standardise(self, x: Tensor, out: Tensor, offset: Tensor | None = None) -> None:
        """Write shifted elements, with mean 0 and times the factor, plus an offset."""
        if self.centred:
            rest = self.rest * self.factor
            offset = rest.neg_() if offset is None else offset - rest
        torch.mul(x, self.rounded_factor, out=out)
        if offset is not None:
            out.add_(offset.to(self.dtype))

    def scale(self, x: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
        """Write the output of the run, where the shifted input is if that is not given."""
        out = self.run.of(y)
        view = out if x is None else self.shifted(self.run.of(x), out)
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
    """The backward of one run.

    With ``inv = 1 / sqrt(variance + eps)``, ``xhat = (x - mean) * inv``, ``g = d_y * weight`` and means over
    a group::

        d_x = inv * (g - mean(g) - xhat * mean(g * xhat))

    or ``inv * g`` where mean and variance are constants. ``total`` and ``product`` are the sums of ``d_y``
    and of ``d_y * xhat`` along which the weight is the same; all of the elements if it is elementwise.
    """

    def __init__(self, run: _Run, x: Tensor, d_y: Tensor) -> None:
        self.run, self.x, self.d_y = run, run.run.of(x), run.run.of(d_y)
        if run.elementwise:
            xhat = torch.empty_like(self.x)
            run.standardise(run.shifted(self.x, xhat), xhat)
            self.total, self.product = self.d_y, xhat.mul_(self.d_y)
        else:
            self.total, product = sums_and_products(self.d_y, self.x, run.shift, run.axes.uniform)
            self.product = product.addcmul_(run.rest, self.total, value=-1).mul_(run.inverse)

    def of_parameter(self, name: str) -> Tensor:
        """Gradient of ``weight`` or ``bias``."""
        rows, run = self.product if name == "weight" else self.total, self.run
        instances = run.axes.instances(rows.dim())
        values = rows.sum(instances) if instances else rows
        extents = [run.shape[d] for d in run.axes.weighted]
        return values.reshape(extents if run.run.channels is None else -1)

    def write_sums(self, pair: Tensor) -> None:
        """The sums of ``g`` and of ``g * xhat`` over the local part of each group."""
        run = self.run
        dims = [d for d in run.axes.reduced if d in run.axes.weighted]
        for rows, sums in zip((self.total, self.product), pair, strict=True):
            weighted = rows if run.weight is None else rows * run.weight
            total = weighted.sum(dims, keepdim=True, dtype=torch.float64) if dims else weighted
            run.run.of_groups(sums).copy_(total)

    def prepare(self, d_x: Tensor, depends: bool) -> None:
        """Write ``x`` without its shift; ``inv * g`` if mean and variance are constants, which is all."""
        run, out = self.run, self.run.run.of(d_x)
        if depends:
            run.shifted(self.x, out)
            return
        torch.mul(self.d_y, run.rounded_factor, out=out)
        if run.elementwise and run.weight is not None:
            out.mul_(run.weight)

    def finish(self, d_x: Tensor, means: Tensor) -> None:
        """Make the gradient of the input of that, of ``d_y``, and of ``mean(g)`` and ``mean(g * xhat)``.

        ``x - mean = shifted - rest``, so that ``d_x = factor * d_y + slope * shifted - (inv * mean(g) +
        slope * rest)`` with ``slope = -inv**2 * mean(g * xhat)``. Elementwise: the same by ``inv``, which
        comes last, with ``weight`` in the place of the factor.
        """
        run, out = self.run, self.run.run.of(d_x)
        of_g, of_product = map(run.run.of_groups, means)
        slope = of_product * -run.inverse
        if not run.elementwise:
            of_g, slope = of_g * run.inverse, slope.mul_(run.inverse)
        torch.mul(out if run.centred else self.x, slope.to(run.dtype), out=out)
        if not run.elementwise:
            out.addcmul_(self.d_y, run.rounded_factor)
        elif run.weight is not None:
            out.addcmul_(self.d_y, run.weight)
        else:
            out.add_(self.d_y)
        if run.centred:
            out.sub_(torch.addcmul(of_g, run.rest, slope).to(run.dtype))
        if run.elementwise:
            out.mul_(run.rounded_factor)

"""Normalisation of a local tensor by statistics of the global one, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.ops.core.result_memory import result_like
from distdl_rma.ops.norm.rows import Array, without_fp_errors
from distdl_rma.ops.norm.statistics import LocalRun, Shift, Statistics, as_type

# Puts the gradient of a parameter, by name, where it is wanted.
Fill = Callable[[str, Tensor], Tensor]
_PARAMETERS = ("weight", "bias")
# Two values of each group, such as mean and variance, in float64.
Pair = tuple[Array, Array]


class NormPlan(NamedTuple):
    """What is alike in all calls of a normalisation of a local tensor, of type ``dtype``."""

    statistics: Statistics
    eps: float
    fill: Fill | None
    dtype: torch.dtype
    wide: torch.dtype  # to compute in


class LocalNorm(OperatorFunction):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of the local tensor, in the type of ``x``.

    By ``constants``, or else by mean and variance of the input, which ``update`` is told of. The backward
    knows that these depend on the input, if some rank needs its gradient: one exchange of two sums per group.
    """

    @staticmethod
    @without_fp_errors
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        _anchor: Tensor | None,
        plan: NormPlan,
        needs_x: bool,
        constants: Pair | None,
        update: Callable[[Pair], None] | None,
    ) -> Tensor:
        """Output of the local tensor; blocking where it is by statistics."""
        statistics, eps = plan.statistics, plan.eps
        mark = statistics.trace.marks(statistics.name)
        wide, shifted = x if x.dtype == plan.wide else x.to(plan.wide), None
        by: Sequence[Shift] = ()
        if constants is None:
            mean, variance, shifted, by = statistics.of(wide, mark)
            if update is not None:
                update((mean, variance))
        else:
            mean, variance = constants
        mark("scale")
        y = result_like(wide) if shifted is None else shifted
        x_or_shifted = wide if shifted is None else None
        scalings = [
            _Scaling(run, statistics.centred, mean, variance, eps, weight, shift, plan.wide).scale(
                x_or_shifted, bias, y
            )
            for run, shift in zip(statistics.runs, by or (None,) * len(statistics.runs), strict=True)
        ]
        mark("")
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.machine = plan, statistics.machine
        ctx.scalings, ctx.depends = scalings, needs_x and constants is None
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y if plan.dtype == plan.wide else y.to(plan.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Gradients; blocking where those of the input depend on other ranks."""
        # In a checkpoint this runs the forward again.
        x, _ = ctx.saved_tensors
        return LocalNorm._gradients(ctx, x, d_y)

    @staticmethod
    @without_fp_errors
    def _gradients(ctx: Any, x: Tensor, d_y: Tensor) -> tuple[Any, ...]:
        plan, statistics = ctx.plan, ctx.plan.statistics
        needs_x, *needs_parameters = ctx.needs_input_grad[:3]
        mark = statistics.trace.marks(statistics.name, backward=True)
        d_x = arrive = None
        if x.dtype != plan.wide:
            x, d_y = x.to(plan.wide), d_y.to(plan.wide)
        mark("local")
        parts = [_Gradient(scaling, x, d_y) for scaling in ctx.scalings]
        if ctx.depends:
            pair = statistics.pair()
            for part in parts:
                part.write_sums(pair)
            mark("")
            arrive = statistics.sum(pair)
        mark("scale")
        d_parameters = [
            _whole(name, parts, dtype, plan.fill) if needed else None
            for name, dtype, needed in zip(_PARAMETERS, ctx.dtypes, needs_parameters, strict=True)
        ]
        if needs_x:
            d_x = result_like(x)
            for part in parts:
                part.prepare(d_x, ctx.depends, statistics.total)
        mark("")
        if arrive is not None:
            sums = arrive()
            if d_x is not None:
                mark("fuse")
                for part in parts:
                    part.finish(d_x, sums)
                mark("")
        if d_x is not None and d_x.dtype != plan.dtype:
            d_x = d_x.to(plan.dtype)
        return d_x, *d_parameters, *(None,) * 5


def _whole(name: str, parts: list[_Gradient], dtype: torch.dtype, fill: Fill | None) -> Tensor:
    if len(parts) == 1:
        whole = parts[0].of_parameter(name, dtype)
    else:
        # Runs are channels side by side.
        wide = [part.of_parameter(name, torch.float64) for part in parts]
        whole = torch.cat([torch.empty(0), *wide]).to(dtype)
    return whole if fill is None else fill(name, whole)


class _Scaling:
    """What forward and backward both need of one run: values per group and per channel.

    With weights that are the same along all that is reduced beside the channels (not ``elementwise``),
    ``factor = weight / sqrt(variance + eps)`` is one value per group and channel. In layer norm it would
    have as many values as there are elements: there the two are multiplied one after the other.

    Something near to the mean, ``shift``, is taken off before anything is multiplied, the rest of it
    afterwards.
    """

    def __init__(
        self,
        run: LocalRun,
        centred: bool,
        mean: Array,
        variance: Array,
        eps: float,
        weight: Tensor | None,
        shift: Shift | None,
        dtype: torch.dtype,
    ) -> None:
        self.run, self.centred, self.dtype = run, centred, dtype
        if not run.whole:
            mean, variance = run.of_groups(mean), run.of_groups(variance)
        inverse = variance + eps
        np.sqrt(inverse, out=inverse)
        self.inverse = np.divide(1, inverse, out=inverse)
        if shift is None:
            self.shift = as_type(mean, dtype)
            self.rest = mean - self.shift.numpy() if centred else mean
        else:
            self.shift, of_run = shift
            self.rest = mean - of_run
        # Elements for elements, or values of float64.
        self.weight: Tensor | None = None
        self.factor = self.inverse
        if weight is not None and run.elementwise:
            self.weight = run.of_parameter(weight).to(dtype)
        elif weight is not None:
            self.factor = self.inverse * run.column_of(weight)
        self.rounded_factor = as_type(self.factor, dtype)

    def shifted(self, x: Tensor, out: Tensor) -> Tensor:
        """Elements without the shift, in ``out`` if there is one."""
        return torch.sub(x, self.shift, out=out) if self.centred else x

    def standardise(self, x: Tensor, out: Tensor, offset: Array | None = None) -> None:
        """Write shifted elements, with mean 0 and times the factor, plus an offset."""
        if self.centred:
            rest = self.rest * self.factor
            # Without a weight there is one factor for a group, and a bias for each channel.
            offset = -rest if offset is None else offset - rest
        torch.mul(x, self.rounded_factor, out=out)
        if offset is not None:
            out.add_(self.run.rounded(offset, self.dtype))

    def scale(self, x: Tensor | None, bias: Tensor | None, y: Tensor) -> _Scaling:
        """Write the output of the run, where the shifted input is if that is not given; return this."""
        run = self.run
        out = y if run.whole else run.of(y)
        view = out if x is None else self.shifted(run.of(x), out)
        if not run.elementwise:
            self.standardise(view, out, None if bias is None else run.column_of(bias))
            return self
        self.standardise(view, out)
        if self.weight is not None:
            out.mul_(self.weight)
        if bias is not None:
            out.add_(run.of_parameter(bias).to(self.dtype))
        return self


class _Gradient:
    """The backward of one run.

    With ``inv = 1 / sqrt(variance + eps)``, ``xhat = (x - mean) * inv``, ``g = d_y * weight`` and means over
    a group::

        d_x = inv * (g - mean(g) - xhat * mean(g * xhat))

    or ``inv * g`` where mean and variance are constants. ``total`` and ``product`` are the sums of ``d_y``
    and of ``d_y * xhat`` along which the weight is the same; all of the elements if it is elementwise.
    """

    def __init__(self, scaling: _Scaling, x: Tensor, d_y: Tensor) -> None:
        run = scaling.run
        self.scaling, self.run = scaling, run
        self.x, self.d_y = (x, d_y) if run.whole else (run.of(x), run.of(d_y))
        self.elements: tuple[Tensor, Tensor] | None = None
        if run.elementwise:
            xhat = torch.empty_like(self.x)
            scaling.standardise(scaling.shifted(self.x, xhat), xhat)
            self.elements = self.d_y, xhat.mul_(self.d_y)
            return
        self.total, product = run.uniform.products(self.d_y, self.x, scaling.shift)
        offset = scaling.rest * self.total
        np.subtract(product, offset, out=offset)
        self.product = np.multiply(offset, scaling.inverse, out=offset)

    def of_parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """Gradient of ``weight`` or ``bias``, in a type."""
        run = self.run
        if self.elements is not None:
            values = self.elements[name == "weight"]
            return (values.sum(run.instances) if run.instances else values).reshape(run.extents).to(dtype)
        rows = self.product if name == "weight" else self.total
        sums = np.add.reduce(rows, run.instances) if run.instances else rows
        return as_type(sums.reshape(run.extents), dtype)

    def write_sums(self, pair: Pair) -> None:
        """The sums of ``g`` and of ``g * xhat`` over the local part of each group.

        Without the weight, where that is the same in all of a group.
        """
        run, scaling = self.run, self.scaling
        of_g, of_product = pair if run.whole else map(run.of_groups, pair)
        if self.elements is not None:
            for values, sums in zip(self.elements, (of_g, of_product), strict=True):
                weighted = values if scaling.weight is None else values * scaling.weight
                sums[...] = weighted.sum(run.in_group, True, dtype=torch.float64).numpy()
        elif run.in_group:
            weight = scaling.factor / scaling.inverse
            np.add.reduce(self.total * weight, run.in_group, keepdims=True, out=of_g)
            np.add.reduce(self.product * weight, run.in_group, keepdims=True, out=of_product)
        else:
            of_g[...], of_product[...] = self.total, self.product

    def prepare(self, d_x: Tensor, depends: bool, total: Array) -> None:
        """Write ``x`` without its shift; ``inv * g`` if mean and variance are constants, which is all.

        ``total`` are the elements of each group.
        """
        run, scaling = self.run, self.scaling
        out = d_x if run.whole else run.of(d_x)
        if depends:
            scaling.shifted(self.x, out)
            # What the sums are multiplied by; where the same in all of a group, also what is in them.
            whole = 1.0 if run.elementwise else scaling.inverse if run.in_group else scaling.factor
            self.per_sum = whole / (total if run.whole else run.of_groups(total))
            self.per_product = -scaling.inverse * self.per_sum
            return
        torch.mul(self.d_y, scaling.rounded_factor, out=out)
        if scaling.weight is not None:
            out.mul_(scaling.weight)

    def finish(self, d_x: Tensor, sums: Pair) -> None:
        """Make the gradient of the input of that, of ``d_y``, and of the sums of ``g`` and of ``g * xhat``.

        ``x - mean = shifted - rest``, so that ``d_x = factor * d_y + slope * shifted - (inv * mean(g) +
        slope * rest)`` with ``slope = -inv**2 * mean(g * xhat)``. Elementwise: the same by ``inv``, which
        comes last, with ``weight`` in the place of the factor.
        """
        run, scaling = self.run, self.scaling
        out = d_x if run.whole else run.of(d_x)
        of_g, of_product = sums if run.whole else map(run.of_groups, sums)
        slope = of_product * self.per_product
        torch.mul(out if scaling.centred else self.x, run.rounded(slope, scaling.dtype), out=out)
        if self.elements is None:
            out.addcmul_(self.d_y, scaling.rounded_factor)
        elif scaling.weight is not None:
            out.addcmul_(self.d_y, scaling.weight)
        else:
            out.add_(self.d_y)
        if scaling.centred:
            offset = of_g * self.per_sum
            slope *= scaling.rest
            offset += slope
            out.sub_(run.rounded(offset, scaling.dtype))
        if self.elements is not None:
            out.mul_(scaling.rounded_factor)

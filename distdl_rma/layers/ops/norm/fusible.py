"""Normalisation of a block in kernels of torch that a compiler can fuse with those before and behind it.

``LocalNorm`` is one operation: its passes over the elements are kernels that are fast alone, and what lies
between them is numpy's. This form has the same exchanges between kernels that are all seen::

    forward     [x  -> sums]             merged      [x, moments -> y]
    backward    [d_y, x -> sums]         summed      [d_y, x, sums -> d_x]
                 compiled, with what          steps of their own: messages
                 comes before

Each bracket is a few passes of torch, and one if they are compiled; alone they are slower than those of
``LocalNorm``. Sums are in float64, so that one pass serves, whatever the mean is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import OperatorFunction, as_step, first_derivative
from distdl_rma.layers.ops.core.tensors import as_array, as_tensor
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes
from distdl_rma.layers.ops.norm.statistics import Statistics, without_fp_errors


class Rows(NamedTuple):
    """How the elements of a block (samples, channels, ...) form groups.

    Values of a group have the shape ``groups``; values per row are (samples, ``number`` of groups, channels
    in each). ``together`` says whether the samples share a mean.
    """

    groups: tuple[int, ...]
    number: int
    together: bool

    @staticmethod
    def of(statistics: Statistics, axes: NormAxes, source: Decomposition) -> Rows | None:
        """Rows of a block; None if its groups are no whole channels. Alike on all ranks."""
        groups = statistics.groups
        spatial = (*range(2, len(groups.local)),)
        if axes.weighted != (1,) or not spatial or axes.uniform not in {spatial, (0, *spatial)}:
            return None
        if axes.groups and source.splits[1].parts > 1:
            return None
        return Rows(groups.shape, groups.shape[1], 0 in axes.reduced)

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the rows of each group, in the shape of groups, of values (samples, channels)."""
        dims = [0, 2] if self.together else [2]
        return values.view(len(values), self.number, -1).sum(dims).view(self.groups)

    def spread(self, values: Tensor, samples: int, channels: int) -> Tensor:
        """Values per row, (samples, channels, 1), of values per group."""
        wide = values.view(-1, self.number, 1).expand(samples, self.number, channels // self.number)
        return wide.reshape(samples, channels, 1)


class FusibleNorm(OperatorFunction):
    """What ``LocalNorm`` computes, to rounding; its kernels and its exchanges are steps of a recording."""

    is_step = False

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        _anchor: Tensor | None,
        plan: Any,
        needs_x: bool,
        update: Callable[..., None] | None,
    ) -> Tensor:
        """Output of the local tensor; blocking."""
        statistics, rows = plan.statistics, plan.rows
        wide = x.reshape(*x.shape[:2], -1).to(torch.float64)
        total, squares = (rows.sums(each.sum(-1)) for each in (wide, wide * wide))
        moments = _merged(total, squares, statistics, update)
        part = _Part(plan, x, weight, moments)
        y = (part.shifted(x) * part.factor.to(plan.wide)) + part.added(bias).to(plan.wide)
        ctx.save_for_backward(x, weight, moments)
        ctx.plan, ctx.machine, ctx.depends = plan, statistics.machine, needs_x
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y.to(x.dtype).view(x.shape)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Gradients; blocking if any rank needs the gradient of the input."""
        x, weight, moments = ctx.saved_tensors
        plan, rows, (needs_x, *needed) = ctx.plan, ctx.plan.rows, ctx.needs_input_grad[:3]
        part, d_x = _Part(plan, x, weight, moments), None
        shifted, g = part.shifted(x), part.rows_of(d_y)
        # Per row the sums of d_y and of d_y * xhat.
        total = g.sum(-1, True, dtype=torch.float64)
        product = (g.to(torch.float64) * shifted).sum(-1, True)
        product = (product - part.rest * total) * part.inverse
        if ctx.depends:
            sums = [rows.sums(part.weighted(each)[..., 0]) for each in (total, product)]
            means = _summed(*sums, plan.statistics)
            if needs_x:
                slope = -part.of_rows(means[1]) * part.inverse * part.inverse
                added = -part.of_rows(means[0]) * part.inverse - slope * part.rest
                factors = [each.to(plan.wide) for each in (part.factor, slope, added)]
                d_x = g * factors[0] + shifted * factors[1] + factors[2]
                d_x = d_x.to(x.dtype).view(x.shape)
        both = zip((product, total), needed, ctx.dtypes, strict=True)
        found = [each.sum(0).to(dtype).view(-1) if wanted else None for each, wanted, dtype in both]
        return d_x, *found, *(None,) * 4


class _Part:
    """Values per row, of one direction; ``shifted`` elements are small against the deviation."""

    def __init__(self, plan: Any, x: Tensor, weight: Tensor | None, moments: Tensor) -> None:
        self._rows, self._wide, (self._samples, self._channels) = plan.rows, plan.wide, x.shape[:2]
        mean, variance = moments.unbind()
        self._shift = self.of_rows(mean).to(plan.wide)
        self.rest = self.of_rows(mean) - self._shift
        self.inverse = self.of_rows((variance + plan.eps).rsqrt())
        self._weight = None if weight is None else weight.to(torch.float64).view(-1, 1)
        self.factor = self.weighted(self.inverse)

    def weighted(self, values: Tensor) -> Tensor:
        return values if self._weight is None else values * self._weight

    def of_rows(self, values: Tensor) -> Tensor:
        """Values of groups, of each row."""
        return self._rows.spread(values, self._samples, self._channels)

    def rows_of(self, x: Tensor) -> Tensor:
        """Elements as (samples, channels, all others), in the type of the computation."""
        return x.reshape(self._samples, self._channels, -1).to(self._wide)

    def shifted(self, x: Tensor) -> Tensor:
        return self.rows_of(x) - self._shift

    def added(self, bias: Tensor | None) -> Tensor:
        offset = -self.rest * self.factor
        return offset if bias is None else offset + bias.to(torch.float64).view(-1, 1)


@as_step
@without_fp_errors
def _merged(
    total: Tensor, squares: Tensor, statistics: Statistics, update: Callable[..., None] | None
) -> Tensor:
    # Mean and variance over the ranks, (2, *groups), of sums over own elements; blocking.
    mean, variance = moments = statistics.merged(as_array(total), as_array(squares))
    if update is not None:
        update((mean, variance))
    return as_tensor(moments)


@as_step
def _summed(total: Tensor, product: Tensor, statistics: Statistics) -> Tensor:
    # Their means over the elements of each group, (2, *groups); blocking.
    pair = statistics.pair()
    pair[0], pair[1] = as_array(total), as_array(product)
    return as_tensor(statistics.sum(pair)() / statistics.total)

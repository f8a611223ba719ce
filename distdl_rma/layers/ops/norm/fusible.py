"""Normalisation of a block in kernels of torch that a compiler can fuse with those before and behind it.

``LocalNorm`` is one operation: its passes over the elements are kernels that are fast alone, and what lies
between them is numpy's. This form has the same exchanges between kernels that are all seen::

    forward     [x  -> mean, squares]    merged     [x, moments -> y]
    backward    [d_y, x -> sums]         summed     [d_y, x, means -> d_x]
                 compiled, with what          steps of their own: messages
                 comes before

Each bracket is a few passes of torch, and one or two if they are compiled; alone they are slower than those
of ``LocalNorm``. Elements are summed about the mean of their row, and rows in float64: a large mean hides no
small variance. Elements of float64, whose squares need more digits, have no such form.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
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

    Values of a group have the shape ``groups``, with ``number`` groups of channels. A row is a channel of a
    sample: values per row have the shape of the block with extents 1 along ``spatial`` dimensions.
    ``together`` says whether the samples share a mean.
    """

    groups: tuple[int, ...]
    number: int
    together: bool
    spatial: tuple[int, ...]

    @staticmethod
    def of(statistics: Statistics, axes: NormAxes, source: Decomposition) -> Rows | None:
        """Rows of a block; None if its groups are no whole channels. Alike on all ranks."""
        groups = statistics.groups
        spatial = (*range(2, len(groups.local)),)
        if axes.weighted != (1,) or not spatial or axes.uniform not in {spatial, (0, *spatial)}:
            return None
        if axes.groups and source.splits[1].parts > 1:
            return None
        return Rows(groups.shape, groups.shape[1], 0 in axes.reduced, spatial)

    def total(self, x: Tensor) -> Tensor:
        """Sums over the elements of each row."""
        return x.sum(self.spatial, True).to(torch.float64)

    def moments(self, x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of the own elements of each group, and sum of squares about it; ``length`` is their number."""
        count = prod(x.shape[2:])
        shift = x.sum(self.spatial, True) / max(count, 1)
        shifted, exact = x - shift, shift.to(torch.float64)
        rest, squares = self.total(shifted), self.total(shifted * shifted)
        mean = self.sums(rest + exact * count) / length
        # From squares about the shift of each row to squares about the mean of the group.
        moved = exact - self.spread(mean, x)
        return mean, self.sums(squares + moved * (2 * rest + moved * count)).clamp(0)

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the rows of each group."""
        samples, channels = values.shape[:2]
        parts = values.view(samples, self.number, channels // max(self.number, 1))
        return parts.sum([0, 2] if self.together else [2]).view(self.groups)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Values per row of a block, of values per group."""
        samples, channels = like.shape[:2]
        of_groups = values.view(self.groups[0], self.number, 1)
        wide = of_groups.expand(samples, self.number, channels // max(self.number, 1))
        return wide.reshape(samples, channels, *(1,) * len(self.spatial))


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
        mean, squares = rows.moments(x.to(plan.wide), as_tensor(statistics.length))
        moments = _merged(mean, squares, statistics)
        if update is not None:
            _update(update, moments)
        part = _Part(plan, x, weight, moments)
        added = -part.rest * part.factor
        if bias is not None:
            added = added + _column(bias, x)
        y: Tensor = part.shifted * part.factor.to(plan.wide) + added.to(plan.wide)
        ctx.save_for_backward(x, weight, moments)
        ctx.plan, ctx.machine, ctx.depends = plan, statistics.machine, needs_x
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y.to(x.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Gradients; blocking if any rank needs the gradient of the input."""
        x, weight, moments = ctx.saved_tensors
        plan, rows, (needs_x, *needed) = ctx.plan, ctx.plan.rows, ctx.needs_input_grad[:3]
        part, g, d_x = _Part(plan, x, weight, moments), d_y.to(plan.wide), None
        # Per row the sums of d_y and of d_y * xhat.
        total, product = rows.total(g), rows.total(g * part.shifted)
        product = (product - part.rest * total) * part.inverse
        if ctx.depends:
            first, second = (rows.sums(part.weighted(each)) for each in (total, product))
            means = _summed(first, second, plan.statistics)
            if needs_x:
                # Once more: two passes that compute them take less time than one that keeps them.
                part = _Part(plan, x, weight, moments)
                slope = -rows.spread(means[1], x) * part.inverse * part.inverse
                added = -rows.spread(means[0], x) * part.inverse - slope * part.rest
                factor, slope, added = (each.to(plan.wide) for each in (part.factor, slope, added))
                d_x = (g * factor + part.shifted * slope + added).to(x.dtype)
        both = zip((product, total), needed, ctx.dtypes, strict=True)
        found = [each.sum(0).to(dtype).flatten() if wanted else None for each, wanted, dtype in both]
        return d_x, *found, *(None,) * 4


class _Part:
    """Elements and values per row, of one direction: ``(shifted - rest) * factor`` has the mean 0.

    ``moments`` are mean and variance of each group. ``shifted`` elements are of the size of the deviation.
    """

    def __init__(self, plan: Any, x: Tensor, weight: Tensor | None, moments: Tensor) -> None:
        mean, variance = (plan.rows.spread(each, x) for each in (moments[0], moments[1]))
        shift = mean.to(plan.wide)
        self.shifted, self.rest = x.to(plan.wide) - shift, mean - shift
        self.inverse = (variance + plan.eps).rsqrt()
        self._weight = None if weight is None else _column(weight, x)
        self.factor = self.weighted(self.inverse)

    def weighted(self, values: Tensor) -> Tensor:
        return values if self._weight is None else values * self._weight


def _column(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.to(torch.float64).view(len(parameter), *(1,) * (x.dim() - 2))


@as_step
@without_fp_errors
def _update(update: Callable[..., None], moments: Tensor) -> None:
    update((*as_array(moments),))


@as_step
@without_fp_errors
def _merged(mean: Tensor, squares: Tensor, statistics: Statistics) -> Tensor:
    # Mean and variance of each group over the ranks, (2, *groups); blocking.
    return as_tensor(statistics.merged(as_array(mean), as_array(squares)))


@as_step
def _summed(first: Tensor, second: Tensor, statistics: Statistics) -> Tensor:
    # Sums over own elements of each group, over the number of all elements, (2, *groups); blocking.
    pair = statistics.pair()
    pair[0], pair[1] = as_array(first), as_array(second)
    return as_tensor(statistics.sum(pair)() / statistics.total)

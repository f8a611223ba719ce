"""Mean and variance of groups whose elements lie on several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.tensors import as_array, as_tensor, result_like
from distdl_rma.ops.norm.statistic_groups import PAIR, NormAxes, StatisticGroups
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.allreduce import Allreduce

# Up to so many ranks, and bytes that each of them receives, everyone's vector goes to everyone.
_ROUND_RANKS, _ROUND_NBYTES = 32, 1 << 20
# Rows of up to so many elements may be added one after the other.
_SHORT = 1 << 16
# Below so many elements a call of the kernel costs more than another pass.
_FEW = 1 << 12


class Shifted(NamedTuple):
    """A local tensor with something near to the mean taken off, and for each run what that was."""

    values: Tensor
    by: list[Tensor]


class Statistics:
    """Mean and variance of groups over the ranks that share them, and the two sums of the backward.

    All groups travel in one message per direction, in float64. Results are bitwise the same on all ranks
    that share. Local to make, alike on these ranks; a direction has memory of the segment from its first
    use, or ``connect``. If not ``centred``, the mean is zero and the variance about zero.
    """

    def __init__(self, site: CallSite, axes: NormAxes, groups: StatisticGroups, centred: bool) -> None:
        self.machine, self.name = machine, _ = site
        self.groups, self.axes, self.centred = groups, axes.in_run, centred
        self.trace = machine.trace
        self.total = groups.total.clamp(min=1)
        shares, mine = groups.counts / self.total, groups.ranks.index(machine.rank)
        self._counts, self._shares = as_array(groups.counts), as_array(shares)
        self._count, self._share = groups.counts[mine], shares[mine]
        number = len(groups.ranks)
        self._alone = number == 1
        self._in_one_round = number <= _ROUND_RANKS and number * groups.nbytes <= _ROUND_NBYTES

    @cached_property
    def _round(self) -> AllPush:
        count = PAIR * prod(self.groups.shape)
        segments, ranks = self.machine.segments, self.groups.ranks
        everyone = AllPush(segments, ranks, count, np.float64, f"{self.name} (norm)")
        weakref.finalize(self, everyone.close)
        return everyone

    @cached_property
    def _two_sums(self) -> tuple[Allreduce, Allreduce]:
        size = prod(self.groups.shape)
        return self._allreduce(size, "mean"), self._allreduce(size, "variance")

    @cached_property
    def _adjoint(self) -> Allreduce:
        return self._allreduce(PAIR * prod(self.groups.shape), "adjoint")

    def _allreduce(self, count: int, what: str) -> Allreduce:
        segments, ranks, name = self.machine.segments, self.groups.ranks, f"{self.name} (norm, {what})"
        sums = Allreduce(segments, ranks, count, np.float64, name=name, one_round=self._in_one_round)
        weakref.finalize(self, sums.close)
        return sums

    def connect(self) -> None:
        """Exchange addresses with the ranks that share the groups; blocking."""
        if not self._alone:
            forward = (self._round,) if self._in_one_round else self._two_sums
            for shared in (*forward, self._adjoint):
                shared.connect()

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Shifted | None]:
        """Mean and variance of all elements of each group, in float64; blocking.

        Of a local tensor of a type to compute in. What it became on the way comes with them, if centred.
        """
        pair = torch.zeros(PAIR, *self.groups.shape, dtype=torch.float64)
        with self.trace.span("local", self.name):
            shifted = self._about_local_mean(x, pair) if self.centred else None
            if shifted is None:
                for run in self.groups.runs:
                    run.of_groups(pair[1]).copy_(square_sums(run.of(x), self.axes.reduced))
        mean, squares = self._merge(pair)
        return mean, squares.div_(self.total), shifted

    def _about_local_mean(self, x: Tensor, pair: Tensor) -> Shifted:
        # Squares about the local mean: a large mean does not swallow a small variance.
        shifted, reduced = Shifted(result_like(x), []), self.axes.reduced
        for run in self.groups.runs:
            mean, squares = run.of_groups(pair[0]), run.of_groups(pair[1])
            view, about = run.of(x), run.of(shifted.values)
            if not view.numel():
                shifted.by.append(mean.to(x.dtype))
                continue
            length = prod(view.shape[d] for d in reduced)
            middle = view.sum(reduced, keepdim=True).div_(length)
            torch.sub(view, middle, out=about)
            shifted.by.append(middle)
            # The sum of what is left makes up for the rounding of the mean. Rounding must not turn the
            # squares of what does not vary at all negative.
            left = row_sums(about, reduced).div_(length)
            torch.add(middle, left, out=mean)
            torch.addcmul(square_sums(about, reduced), left, left, value=-length, out=squares).clamp_(min=0)
        return shifted

    def _merge(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        # From the mean of each rank, and the squares about it, to those of all ranks together.
        if self._alone:
            return pair[0], pair[1]
        if not self._in_one_round:
            first, second = self._two_sums
            mean = _start(first, self._share * pair[0])().clone()
            about = torch.addcmul(pair[1], self._count, (pair[0] - mean).square_())
            return mean, _start(second, about)().clone()
        # The norm allreduce of the forward, in one round: each rank reduces what it gets.
        title = f"{self.name} (norm)"
        arrive = self.trace.depart("allreduce", title)
        with self.trace.span("start", title):
            self._round.start(as_array(pair.view(-1)))
        with self.trace.span("wait", title):
            rows = self._round.wait().reshape(len(self.groups.ranks), *pair.shape)
        arrive()
        means, squares = rows[:, 0], rows[:, 1]
        middle = means[0] + np.add.reduce((means - means[0]) * self._shares)
        apart = means - middle
        return as_tensor(middle), as_tensor(np.add.reduce(apart * apart * self._counts + squares))

    def sum(self, pair: Tensor) -> Callable[[], Tensor]:
        """Start to sum two values per group over the ranks; the call of what is returned waits for them.

        The sums are valid until the next but one start.
        """
        return (lambda: pair) if self._alone else _start(self._adjoint, pair)


def _start(sums: Allreduce, values: Tensor) -> Callable[[], Tensor]:
    sums.active[:] = as_array(values.view(-1))
    sums.start()
    return lambda: as_tensor(sums.wait()).view(values.shape)


def row_sums(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim():
        return x.sum(dims, keepdim=True, dtype=torch.float64)
    # Summing is exact enough in the type of the data, pairwise as torch does it, and ten times as fast.
    return _rest(x.sum(tuple(range(outer, x.dim())), keepdim=True).to(torch.float64), dims, outer)


def square_sums(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum of squares over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim() or not 0 < prod(x.shape[outer:]) <= _SHORT:
        return row_sums(x.square(), dims)
    norms = torch.linalg.vector_norm(x, 2, tuple(range(outer, x.dim())), keepdim=True)
    return _rest(norms.to(torch.float64).square_(), dims, outer)


def sums_and_products(a: Tensor, b: Tensor, mean: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Sums of ``a`` and of ``a * (b - mean)`` over some dimensions, kept with extent 1; in float64.

    ``a`` and ``b`` are of one shape, to which ``mean`` broadcasts, of extent 1 in ``dims``.
    """
    outer = _outer(a, dims)
    rows, length = prod(a.shape[:outer]), prod(a.shape[outer:])
    # The kernel takes rows of one element for another layout, and is wrong there.
    if length < 2 or a.numel() < _FEW:
        return row_sums(a, dims), row_sums(a * (b - mean), dims)
    # The trailing ones by the kernel of batch norm: one pass, without a tensor of products.
    flat = mean.expand(*a.shape[:outer], *mean.shape[outer:]).reshape(rows)
    one, mask = torch.ones_like(flat), (False, True, True)
    in_rows = (t.reshape(1, rows, length) for t in (a, b))
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        *in_rows, None, None, None, flat, one, True, 0.0, mask
    )
    shape = (*a.shape[:outer], *(1,) * (a.dim() - outer))
    products = _rest(products.to(torch.float64).view(shape), dims, outer)
    if length > _SHORT:
        return row_sums(a, dims), products
    return _rest(sums.to(torch.float64).view(shape), dims, outer), products


def _rest(rows: Tensor, dims: tuple[int, ...], outer: int) -> Tensor:
    # What is left to sum over, once the trailing dimensions are done.
    before = tuple(d for d in dims if d < outer)
    return rows.sum(before, keepdim=True) if before else rows


def _outer(x: Tensor, dims: tuple[int, ...]) -> int:
    # Number of dimensions before those at the end that are all summed over.
    outer = x.dim()
    while outer and outer - 1 in dims:
        outer -= 1
    return outer

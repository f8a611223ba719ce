"""Mean and variance of cells whose elements lie on several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.machine import Machine
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.result_pool import result_like
from distdl_rma.ops.tensors import as_array, as_tensor
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.allreduce import Allreduce

# Statistics travel in float64, whatever the dtype of the data.
_DTYPE = np.float64
# Two numbers per cell in every message.
_PAIR = 2
# Rows of up to so many elements may be added one after the other.
_SHORT = 1 << 16
# Below so many elements a call of the kernel costs more than another pass.
_FEW = 1 << 12
# Up to so many ranks, and bytes that each of them receives, everyone's vector goes to everyone.
_ROUND_RANKS, _ROUND_NBYTES = 32, 1 << 20


class Shifted(NamedTuple):
    """A local tensor with something near to the mean taken off, and for each band what that was."""

    values: torch.Tensor
    by: list[torch.Tensor]


class Statistics:
    """Mean and variance of cells over the ranks that share them, and the two sums of the backward.

    All cells travel in one message per direction. Results are bitwise the same on all ranks that share.
    Construction is local and alike on these ranks.

    Parameters
    ----------
    machine
        The machine.
    layout
        What is reduced.
    cells
        This rank's cells.
    centred
        Whether the variance is about the mean; otherwise it is about zero, and the mean is zero.
    name
        For messages.
    """

    def __init__(
        self, machine: Machine, layout: NormAxes, cells: StatisticGroups, centred: bool, name: str
    ) -> None:
        self.cells, self.layout, self.centred = cells, layout.viewed, centred
        self.name, self._trace = name, machine.trace
        self.total = cells.total.clamp(min=1)
        shares, mine = cells.counts / self.total, cells.ranks.index(machine.rank)
        self._counts, self._shares = as_array(cells.counts), as_array(shares)
        self._count, self._share = cells.counts[mine], shares[mine]
        size, number = prod(cells.shape), len(cells.ranks)
        self.nbytes = message_nbytes(cells)
        small = number <= _ROUND_RANKS and number * self.nbytes <= _ROUND_NBYTES
        segments = machine.segments

        def allreduce(count: int, what: str) -> Allreduce:
            title = f"{name} (norm, {what})"
            sums = Allreduce(segments, cells.ranks, count, _DTYPE, name=title, one_round=small)
            weakref.finalize(self, sums.close)
            return sums

        self._round: AllPush | None = None
        self._forward: tuple[Allreduce, ...] = ()
        self._backward = None if number == 1 else allreduce(_PAIR * size, "adjoint")
        if number > 1 and small:
            self._round = AllPush(segments, cells.ranks, _PAIR * size, _DTYPE, f"{name} (norm)")
            weakref.finalize(self, self._round.close)
        elif number > 1:
            self._forward = allreduce(size, "mean"), allreduce(size, "variance")

    def connect(self) -> None:
        """Exchange addresses with the ranks that share the cells; blocking."""
        for shared in (self._round, *self._forward, self._backward):
            if shared is not None:
                shared.connect()

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Shifted | None]:
        """Mean and variance of all elements of each cell, in float64; blocking.

        What the local tensor became on the way comes with them, if they are centred.

        Parameters
        ----------
        x
            Local tensor, of a type to compute in.
        """
        pair = torch.zeros(_PAIR, *self.cells.shape, dtype=torch.float64)
        with self._trace.span("local", self.name):
            shifted = self._locate(x, pair) if self.centred else None
            if shifted is None:
                for band in self.cells.bands:
                    band.of_cells(pair[1]).copy_(square_sums(band.of(x), self.layout.reduced))
        mean, squares = self._merge(pair)
        return mean, squares.div_(self.total), shifted

    def _locate(self, x: torch.Tensor, pair: torch.Tensor) -> Shifted:
        # Squares about the local mean: a large mean does not swallow a small variance.
        shifted, reduced = Shifted(result_like(x), []), self.layout.reduced
        for band in self.cells.bands:
            mean, squares = band.of_cells(pair[0]), band.of_cells(pair[1])
            view, about = band.of(x), band.of(shifted.values)
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

    def _merge(self, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # From the mean of each rank, and the squares about it, to those of all ranks together.
        if self._round is not None:
            rows = self._exchanged(self._round, pair).reshape(len(self.cells.ranks), *pair.shape)
            means, squares = rows[:, 0], rows[:, 1]
            mean = means[0] + np.add.reduce((means - means[0]) * self._shares)
            apart = means - mean
            about = np.add.reduce(apart * apart * self._counts + squares)
            return as_tensor(mean), as_tensor(about)
        if self._forward:
            first, second = self._forward
            mean = _start(first, self._share * pair[0])().clone()
            about = torch.addcmul(pair[1], self._count, (pair[0] - mean).square_())
            return mean, _start(second, about)().clone()
        return pair[0], pair[1]

    def _exchanged(self, everyone: AllPush, pair: torch.Tensor) -> npt.NDArray[np.float64]:
        # The norm allreduce of the forward, in one round: each rank reduces what it gets.
        title = f"{self.name} (norm)"
        arrive = self._trace.depart("allreduce", title)
        with self._trace.span("start", title):
            everyone.start(as_array(pair.view(-1)))
        with self._trace.span("wait", title):
            rows = everyone.wait()
        arrive()
        return rows

    def sum(self, pair: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum two values per cell over the ranks; the call of what is returned waits for them.

        The sums are valid until the next but one start.
        """
        return _start(self._backward, pair) if self._backward is not None else lambda: pair


def message_nbytes(cells: StatisticGroups) -> int:
    """Bytes of one message with the statistics of some cells."""
    return _PAIR * prod(cells.shape) * np.dtype(_DTYPE).itemsize


def _start(sums: Allreduce, values: torch.Tensor) -> Callable[[], torch.Tensor]:
    sums.active[:] = as_array(values.view(-1))
    sums.start()
    return lambda: as_tensor(sums.wait()).view(values.shape)


def row_sums(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim():
        return x.sum(dims, keepdim=True, dtype=torch.float64)
    # Summing is exact enough in the type of the data, pairwise as torch does it, and ten times as fast.
    return _rest(x.sum(tuple(range(outer, x.dim())), keepdim=True).to(torch.float64), dims, outer)


def square_sums(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum of squares over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim() or not 0 < prod(x.shape[outer:]) <= _SHORT:
        return row_sums(x.square(), dims)
    norms = torch.linalg.vector_norm(x, 2, tuple(range(outer, x.dim())), keepdim=True)
    return _rest(norms.to(torch.float64).square_(), dims, outer)


def sums_and_products(
    a: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of ``a`` and of ``a * (b - mean)`` over some dimensions, kept with extent 1; in float64.

    Parameters
    ----------
    a, b
        Tensors of one shape.
    mean
        Broadcasts to it, of extent 1 in ``dims``.
    dims
        What to sum over.
    """
    outer = _outer(a, dims)
    rows, length = prod(a.shape[:outer]), prod(a.shape[outer:])
    # The kernel takes rows of one element for another layout, and is wrong there.
    if length < 2 or a.numel() < _FEW:
        return row_sums(a, dims), row_sums(a * (b - mean), dims)
    # The trailing ones by the kernel of batch norm: one pass, without a tensor of products.
    flat = mean.expand(*a.shape[:outer], *mean.shape[outer:]).reshape(rows)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        a.reshape(1, rows, length),
        b.reshape(1, rows, length),
        None,
        None,
        None,
        flat,
        torch.ones_like(flat),
        True,
        0.0,
        (False, True, True),
    )
    shape = (*a.shape[:outer], *(1,) * (a.dim() - outer))
    products = _rest(products.to(torch.float64).view(shape), dims, outer)
    if length > _SHORT:
        return row_sums(a, dims), products
    return _rest(sums.to(torch.float64).view(shape), dims, outer), products


def _rest(rows: torch.Tensor, dims: tuple[int, ...], outer: int) -> torch.Tensor:
    # What is left to sum over, once the trailing dimensions are done.
    before = tuple(d for d in dims if d < outer)
    return rows.sum(before, keepdim=True) if before else rows


def _outer(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    # Number of dimensions before those at the end that are all summed over.
    outer = x.dim()
    while outer and outer - 1 in dims:
        outer -= 1
    return outer

"""Mean and variance of cells whose elements lie on several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod

import numpy as np
import torch

from distdl_rma.layers.cells import Cells, Layout
from distdl_rma.layers.tensors import as_array, as_tensor
from distdl_rma.machine import Machine
from distdl_rma.segments.allreduce import Allreduce
from distdl_rma.segments.round import Round

__all__ = ["Statistics", "inner", "message_nbytes"]

# Statistics travel in float64, whatever the dtype of the data.
_DTYPE = np.float64
# Two numbers per cell in every message.
_PAIR = 2
# Up to so many ranks, and bytes that each of them receives, everyone's vector goes to everyone.
_ROUND_RANKS, _ROUND_NBYTES = 32, 1 << 20


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

    def __init__(self, machine: Machine, layout: Layout, cells: Cells, centred: bool, name: str) -> None:
        self.cells, self.layout, self.centred = cells, layout.viewed, centred
        self.name, self._trace = name, machine.trace
        self.total = cells.total.clamp(min=1)
        self._counts, self._shares = cells.counts, cells.counts / self.total
        self._mine = cells.ranks.index(machine.rank)
        size, number = prod(cells.shape), len(cells.ranks)
        self.nbytes = message_nbytes(cells)
        small = number <= _ROUND_RANKS and number * self.nbytes <= _ROUND_NBYTES
        segments = machine.segments

        def allreduce(count: int, what: str) -> Allreduce:
            title = f"{name} (norm, {what})"
            sums = Allreduce(segments, cells.ranks, count, _DTYPE, name=title, one_round=small)
            weakref.finalize(self, sums.close)
            return sums

        self._round: Round | None = None
        self._forward: tuple[Allreduce, ...] = ()
        self._backward = None if number == 1 else allreduce(_PAIR * size, "adjoint")
        if number > 1 and small:
            self._round = Round(segments, cells.ranks, _PAIR * size, _DTYPE, f"{name} (norm)")
            weakref.finalize(self, self._round.close)
        elif number > 1:
            self._forward = allreduce(size, "mean"), allreduce(size, "variance")

    def connect(self) -> None:
        """Exchange addresses with the ranks that share the cells; blocking."""
        for shared in (self._round, *self._forward, self._backward):
            if shared is not None:
                shared.connect()

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of all elements of each cell, in float64; blocking.

        Parameters
        ----------
        x
            Local tensor, of a type to compute in.
        """
        with self._trace.span("local", self.name):
            pair = self._local(x)
        mean, squares = self._merge(pair)
        return mean, squares / self.total

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        # Squares about the local mean: a large mean does not swallow a small variance.
        pair = torch.zeros(_PAIR, *self.cells.shape, dtype=torch.float64)
        reduced = self.layout.reduced
        for band in self.cells.bands:
            view = band.of(x)
            if not view.numel():
                continue
            mean, squares = band.of_cells(pair[0]), band.of_cells(pair[1])
            if self.centred:
                variance, middle = torch.var_mean(view, dim=reduced, correction=0, keepdim=True)
                mean.copy_(middle)
                squares.copy_(variance).mul_(prod(view.shape[d] for d in reduced))
            else:
                squares.copy_(inner(view, view, reduced))
        return pair

    def _merge(self, pair: torch.Tensor) -> torch.Tensor:
        # From the mean of each rank, and the squares about it, to those of all ranks together.
        if self._round is not None:
            rows = as_tensor(self._exchanged(self._round, pair)).view(len(self.cells.ranks), *pair.shape)
            means, squares = rows[:, 0], rows[:, 1]
            mean = means[0] + (self._shares * (means - means[0])).sum(0)
            return torch.stack((mean, (squares + self._counts * (means - mean).square()).sum(0)))
        if self._forward:
            first, second = self._forward
            mean = _start(first, self._shares[self._mine] * pair[0])()
            about = pair[1] + self._counts[self._mine] * (pair[0] - mean).square()
            return torch.stack((mean, _start(second, about)()))
        return pair

    def _exchanged(
        self, everyone: Round, pair: torch.Tensor
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        # The norm allreduce of the forward, in one round: each rank reduces what it gets.
        title = f"{self.name} (norm)"
        arrive = self._trace.depart("allreduce", title)
        with self._trace.span("start", title):
            everyone.start(as_array(pair.reshape(-1)))
        with self._trace.span("wait", title):
            rows = everyone.wait()
        arrive()
        return rows

    def sum(self, pair: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum two values per cell over the ranks; the call of what is returned waits for them."""
        return _start(self._backward, pair) if self._backward is not None else lambda: pair


def message_nbytes(cells: Cells) -> int:
    """Bytes of one message with the statistics of some cells."""
    return _PAIR * prod(cells.shape) * np.dtype(_DTYPE).itemsize


def _start(sums: Allreduce, values: torch.Tensor) -> Callable[[], torch.Tensor]:
    sums.active[:] = as_array(values.reshape(-1))
    sums.start()
    return lambda: as_tensor(sums.wait()).clone().view(values.shape)


def inner(a: torch.Tensor, b: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum of ``a * b`` over some dimensions, which are kept with extent 1; in float64."""
    outer = a.dim()
    while outer and outer - 1 in dims:
        outer -= 1
    if outer == a.dim():
        return (a * b).sum(dims, keepdim=True, dtype=torch.float64)
    # The trailing ones by products of vectors, without a tensor of products.
    rows, length = prod(a.shape[:outer]), prod(a.shape[outer:])
    products = torch.bmm(a.reshape(rows, 1, length), b.reshape(rows, length, 1)).to(torch.float64)
    products = products.view(*a.shape[:outer], *(1,) * (a.dim() - outer))
    rest = [d for d in dims if d < outer]
    return products.sum(rest, keepdim=True) if rest else products

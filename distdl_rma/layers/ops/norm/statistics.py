"""Mean and variance of groups whose elements are on several ranks.

Each rank computes a mean and the squares about that mean of its own elements; the ranks exchange both, two
numbers for each group, and merge them. For two ranks with ``n`` and ``m`` elements::

    rank 0    mean a, squares p                      delta   = b - a
                                      ---->          mean    = a + delta * m / (n + m)
    rank 1    mean b, squares q                      squares = p + q + delta**2 * n * m / (n + m)

A sum and a sum of squares would merge more simply, but lose everything where the mean is large: the squares
of elements near 10,000 hide a deviation of 1 in float32. So own squares are computed about the own mean, in a
second pass if the first has lost digits (``_CANCELLED``), and merged as above in float64.

How values travel::

    up to 32 ranks, 1 MiB in all   one round: every rank pushes to every rank and merges by itself
    more                           two allreduces: the mean first, then the squares about it
    ranks in order (``order.py``)  one wait for all ranks

Merged in the order of the ranks everywhere, so that results are bitwise equal on all ranks. That is more than
beauty: ranks whose statistics differ in the last bit drift apart over thousands of steps.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from math import prod
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from distdl_rma.layers.dtypes import NUMPY, as_numbers, sum_dtype
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.order import Vectors, in_order, vectors_of
from distdl_rma.layers.ops.core.result_memory import result_like
from distdl_rma.layers.ops.norm.statistic_groups import PAIR, Array, StatisticGroups
from distdl_rma.layers.staging import down, up
from distdl_rma.segments.collectives.allreduce import Allreduce

P = ParamSpec("P")
R = TypeVar("R")
# Longest piece of a row, in elements, that is summed in the type of the computation.
_PIECE = 1 << 8
# Up to so many times the squares about the mean, the squares of the elements are exact enough.
_CANCELLED = 5.0
# Gradients of the weight and bias of a group norm are sums of ``a * b`` and of ``a`` over each row, if each
# row is a channel of mean 0 and deviation 1. Computed in one pass, by all threads of torch.
_sums_of_rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten.native_group_norm_backward._op
_NO_INPUT_GRADIENT = (False, True, True)


class Rows:
    """Sums of tensors of a ``shape`` over ``dims``, which are kept with extent 1, in float64.

    One pass over the memory for both sums, by all threads: a kernel of torch's group norm computes them for
    each row. Its sums of float32 are in float32, so long rows are cut into pieces of 256 elements.

    A row has the elements along the trailing dimensions of ``dims``. A piece of a row is summed in the type
    of the data, 16-bit floats in float32; sums of several pieces and rows are added in float64.
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        outer = len(shape)
        while outer and outer - 1 in dims:
            outer -= 1
        self.shape = tuple(1 if d in dims else n for d, n in enumerate(shape))
        self._dims, self._trailing = tuple(dims), outer < len(shape)
        self._flat = *shape[:outer], prod(shape[outer:])
        self._outer = tuple(d + 1 for d in dims if d < outer and shape[d] != 1)
        self._empty, self._number, length = 0 in shape, prod(shape[:outer]), self._flat[-1]
        # Pieces fill a row, if any of about the longest length do.
        fills = (n for n in range(_PIECE, _PIECE // 4, -1) if length % n == 0)
        piece = next(fills, _PIECE) if length > _PIECE else max(length, 1)
        # If no pieces of one length fill a row: its part in pieces, and the rest.
        self._cut: tuple[Rows, Rows] | None = None
        self._whole = length - length % piece
        if self._whole != length and self._trailing:
            parts = (Rows((*shape[:outer], n), (*dims, outer)) for n in (self._whole, length % piece))
            self._cut = next(parts), next(parts)
        # Numbers for the kernel; and by type, for each piece a mean of 0, a deviation and a weight of 1.
        self._pieces = pieces = self._number * length // piece
        self._sizes = 1, pieces, piece, pieces
        rows = *shape[:outer], *(1,) * (len(shape) - outer)
        self._of_pieces = (2, *rows) if length == piece else (2, *rows, length // piece)
        self._constants: dict[torch.dtype, list[Tensor]] = {}

    def sums(self, a: Tensor, b: Tensor) -> Array:
        """Sums of ``a`` and of ``a * b``, (2, *shape); of tensors of one type without a graph."""
        if self._empty:
            return np.zeros((2, *self.shape))
        if not a.is_cpu:
            return self._sums_on_device(a, b)
        if not self._trailing:
            a, b = (x.to(sum_dtype(x.dtype)) for x in (a, b))
            both = a.to(torch.float64), (a * b).to(torch.float64)
            sums = [x.sum(self._dims, True) if self._dims else x for x in both]
            return np.stack([as_numbers(x) for x in sums])
        if self._cut is not None:
            cut, (whole, rest) = self._whole, self._cut
            a, b = a.reshape(self._flat), b.reshape(self._flat)
            found = whole.sums(a[..., :cut], b[..., :cut]) + rest.sums(a[..., cut:], b[..., cut:])
            return found.reshape(2, *self.shape)
        if a.dtype not in self._constants:
            dtype, number = NUMPY[sum_dtype(a.dtype)], self._pieces
            zeros, ones = (torch.from_numpy(np.full((1, number), value, dtype)) for value in (0, 1))
            self._constants[a.dtype] = [zeros, ones, ones.view(number)]
        # The kernel looks at these numbers only, not at shapes; a vector is never in channels-last order.
        first = a.ravel()
        second = first if b is a else b.ravel()
        _, products, totals = _sums_of_rows(
            first, second, *self._constants[a.dtype], *self._sizes, _NO_INPUT_GRADIENT
        )
        found = np.empty((2, self._pieces))
        found[0], found[1] = totals.numpy(), products.numpy()
        found = found.reshape(self._of_pieces)
        if self._pieces != self._number:
            found = np.add.reduce(found, -1)
        return np.add.reduce(found, self._outer, keepdims=True) if self._outer else found

    def _sums_on_device(self, a: Tensor, b: Tensor) -> Array:
        # Reduced by the device's kernels, so that one small vector comes down.
        a, b = (x.to(sum_dtype(x.dtype)) for x in (a, b))
        double = torch.float64
        sums = [x.sum(self._dims, True, dtype=double) if self._dims else x.to(double) for x in (a, a * b)]
        return down(torch.stack(sums)).numpy()


class _Quiet(threading.local):
    # numpy keeps its error state in the context: to enter a prepared context costs a fifth of np.errstate.
    def __init__(self) -> None:
        self.context = contextvars.Context()
        self.context.run(np.seterr, all="ignore")


_QUIET = _Quiet()


def without_fp_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Function in which numpy ignores infinities and NaN; such functions must not call each other.

    A norm of infinite elements is NaN in torch, without a warning.
    """

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        return _QUIET.context.run(function, *args, **kwargs)

    return quiet


# Types that numpy computes in here; torch converts others from and to float64.
FLOATS = (torch.float32, torch.float64)
# Up to so many ranks, and so many bytes received per rank, each rank sends its values to all others.
_ROUND_RANKS, _ROUND_NBYTES = 32, 1 << 20
# Values of up to so many ranks are merged rank by rank; values of more are merged as one array.
_FEW_RANKS = 3


class Shifted(NamedTuple):
    """The local tensor minus a value near the mean of each group, ``shift``, per group and per row.

    The forward has it anyway where it was needed for the squares, and scales it in place.
    """

    tensor: Tensor
    shift: Array
    of_rows: Tensor


# Mean and variance of each group, in float64; and the shifted tensor if a large mean would hide a variance.
Moments = tuple[Array, Array, Shifted | None]


def as_type(values: Array, dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
    """A copy of values as a tensor of a type, rounded; on the device of ``like``, else on the CPU."""
    if like is not None and not like.is_cpu:
        return up(as_type(values, dtype), like.device)
    # For few values, numpy takes a quarter of torch's time.
    if dtype in FLOATS:
        return torch.from_numpy(values.astype(NUMPY[dtype]))
    return torch.from_numpy(values).to(dtype)


class Statistics:
    """Mean and variance of groups over the ranks that share them, and the two sums of the backward.

    All groups travel together, in float64: in one exchange, or two in the forward of many ranks or groups.
    Results are bitwise equal on all sharing ranks. Local to make, on all of these ranks. A direction has
    segment memory from its first use, or from ``connect``. If not ``centred``, the mean is zero and the
    variance is about zero.
    """

    def __init__(self, site: CallSite, groups: StatisticGroups, centred: bool) -> None:
        self.machine, self.name = machine, _ = site
        self.groups, self.rows, self.centred = groups, Rows(groups.local, groups.row_dims), centred
        self.trace = machine.trace
        number = len(groups.ranks)
        self._alone = number == 1
        self._title = f"{self.name} (norm)"
        small = number <= _ROUND_RANKS and number * groups.nbytes <= _ROUND_NBYTES
        self._in_one_round = small or in_order(machine)
        self._few = number <= _FEW_RANKS and not in_order(machine)
        self.total: Array = groups.total.clamp(min=1).numpy()
        self._counts: Array = groups.counts.numpy()
        if self._in_one_round:
            # Of the shape of the values: numpy takes several times as long to broadcast.
            self.total = np.broadcast_to(self.total, groups.shape).copy()
            self._counts = np.broadcast_to(self._counts, (number, *groups.shape)).copy()
        self._shares = self._counts / self.total
        self._mine = groups.ranks.index(machine.rank)
        self.length: Array = np.broadcast_to(np.maximum(self._counts[self._mine], 1), groups.shape).copy()
        # Values that this rank sends: means of its elements, and squares about them.
        self._pair: Array = np.zeros((PAIR, *groups.shape))
        self._row = self._pair.reshape(-1)
        # Sums of the elements and of their squares, of one call; None where rows are groups.
        self._sums = None if groups.shape == groups.rows else np.empty_like(self._pair)
        # Cache of _view: there are few buffers, and they stay.
        self._views: list[tuple[Array, Array]] = []

    @cached_property
    def _round(self) -> Vectors:
        count = PAIR * prod(self.groups.shape)
        everyone = vectors_of(self.machine, self.groups.ranks, count, self._title)
        weakref.finalize(self, everyone.close)
        return everyone

    @cached_property
    def _parts(self) -> list[list[tuple[Array, Array]]]:
        # For even and odd rounds, each rank's values: views of the segment, which cost more than the sums.
        return [
            [(means, squares) for means, squares in (row.reshape(self._pair.shape) for row in rows)]
            for rows in self._round.rows
        ]

    @cached_property
    def _joined(self) -> tuple[list[Array], list[Array]]:
        # Per rank after the first, to merge it with the ranks before it: its share of their elements, and the
        # factor of the squared distance of the means.
        added, most = self._counts[1:], np.maximum(self._counts.cumsum(0), 1)[1:]
        return [*(added / most)], [*(added / most * (most - added))]

    @cached_property
    def _two_sums(self) -> tuple[Allreduce, Allreduce]:
        size = prod(self.groups.shape)
        return self._allreduce(size, "mean"), self._allreduce(size, "variance")

    @cached_property
    def _adjoint(self) -> Allreduce:
        return self._allreduce(PAIR * prod(self.groups.shape), "adjoint")

    def _allreduce(self, count: int, what: str) -> Allreduce:
        segments, ranks, name = self.machine.segments, self.groups.ranks, f"{self.name} (norm, {what})"
        return Allreduce(segments, ranks, count, np.float64, name=name, one_round=self._in_one_round)

    def connect(self) -> None:
        """Exchange addresses with the ranks that share the groups; blocking."""
        if not self._alone:
            forward = (self._round,) if self._in_one_round else self._two_sums
            for shared in (*forward, self._adjoint):
                shared.connect()

    def of(self, x: Tensor, mark: Callable[[str], object]) -> Moments:
        """Mean and variance of all elements of each group; blocking.

        ``x`` is the local tensor, without a graph. ``mark`` is for traces.
        """
        mark("local")
        shifted = self._compute_own(x)
        mean, squares = self._merge(self._pair, mark)
        return mean, squares / self.total, shifted

    def merged(self, mean: Array, squares: Array) -> Array:
        """Mean and variance over the ranks, (2, *groups), of means and squares of own elements; blocking."""
        self._pair[...] = mean, squares
        mean, squares = self._merge(self._pair, lambda _: None)
        return np.stack((mean, squares / self.total))

    def _compute_own(self, x: Tensor) -> Shifted | None:
        # Writes mean and squares of the local elements of each group.
        rows, groups, (mean, squares) = self.rows, self.groups, self._pair
        total, found = groups.sums(rows.sums(x, x), self._sums)
        if not self.centred:
            squares[...] = found
            if np.isnan(squares).any():
                # The kernel multiplies infinite sums by 0: here the sums of the squares alone.
                x = x.to(sum_dtype(x.dtype)).square()
                squares[...], _ = groups.sums(rows.sums(x, x))
            return None
        np.divide(total, self.length, out=mean)
        total *= mean
        np.subtract(found, total, out=squares)
        # All of them are true: bytes without a zero, which takes a third of the time of numpy's reduction.
        if 0 not in (squares * _CANCELLED >= found).tobytes():
            return None
        # Squares about the local mean, so a large mean hides no small variance.
        x = x.to(sum_dtype(x.dtype))
        shift = as_type(mean, x.dtype).numpy()
        of_rows = torch.from_numpy(groups.spread(shift))
        of_rows = of_rows if x.is_cpu else up(of_rows, x.device)
        y = torch.sub(x, of_rows, out=result_like(x))
        # The sum of the shifted elements corrects the rounding of the mean. The squares of constant elements
        # must not be negative by rounding.
        total, found = groups.sums(rows.sums(y, y))
        left = total / self.length
        np.add(shift, left, out=mean)
        total *= left
        np.subtract(found, total, out=squares)
        np.maximum(squares, 0, out=squares)
        # Not NaN where the squares of finite elements are too large.
        squares[found == np.inf] = np.inf
        return Shifted(y, shift, of_rows)

    def _merge(self, pair: Array, mark: Callable[[str], object]) -> tuple[Array, Array]:
        # Mean of all ranks' elements and squares about it, from each rank's mean and the squares about that.
        if self._alone:
            return pair[0].copy(), pair[1]
        if not self._in_one_round:
            first, second = self._two_sums
            shape, own = pair[0].shape, self._shares[self._mine] * pair[0]
            mean = first(own.reshape(-1)).reshape(shape).copy()
            delta = pair[0] - mean
            squares = pair[1] + self._counts[self._mine] * delta * delta
            return mean, second(squares.reshape(-1)).reshape(shape)
        # Allreduce in one round: each rank reduces the values that it receives.
        mark("start")
        arrive = None
        if self.trace.recording is not None:
            arrive = self.trace.depart("allreduce", self._title)
        self._round.start(self._row)
        mark("wait")
        rows = self._round.wait()
        if arrive is not None:
            arrive()
        mark("fuse")
        if self._few:
            return self._one_by_one(self._parts[self._round.epoch & 1])
        return self._together(rows.reshape(len(rows), *pair.shape))

    def _one_by_one(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        mean, squares = parts[0]
        for (its_mean, its_squares), share, spread in zip(parts[1:], *self._joined, strict=True):
            delta = its_mean - mean
            mean = delta * share + mean
            delta *= delta
            delta *= spread
            delta += squares
            delta += its_squares
            squares = delta
        return mean, squares

    def _together(self, rows: Array) -> tuple[Array, Array]:
        means, squares = rows[:, 0], rows[:, 1]
        first = means[0]
        delta = means - first
        middle = first + np.add.reduce(delta * self._shares)
        np.subtract(means, middle, out=delta)
        delta *= delta
        delta *= self._counts
        delta += squares
        return middle, np.add.reduce(delta)

    def pair(self) -> Array:
        """Memory for two values per group to sum, (2, *groups): the operand of the allreduce itself."""
        return np.empty_like(self._pair) if self._alone else self._view(self._adjoint.active)

    def sum(self, pair: Array) -> Callable[[], Array]:
        """Start to sum two values per group, in memory of ``pair()``, over the ranks.

        The returned function waits for the sums and returns them; they are valid until the second next start.
        """
        if self._alone:
            return lambda: pair
        sums = self._adjoint
        sums.start()
        return lambda: self._view(sums.wait())

    def _view(self, buffer: Array) -> Array:
        for known, view in self._views:
            if known is buffer:
                return view
        self._views.append((buffer, buffer.reshape(self._pair.shape)))
        return self._views[-1][1]

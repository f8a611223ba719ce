"""Mean and variance of groups whose elements are on several ranks."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distdl_rma.dtypes import NUMPY
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.result_memory import result_like
from distdl_rma.ops.norm.statistic_groups import PAIR, ChannelRun, NormAxes, StatisticGroups
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.allreduce import Allreduce

P = ParamSpec("P")
R = TypeVar("R")
# There are few values per row: numpy computes on them in a third of the time of a torch call.
Array = NDArray[Any]
# Longest row, in elements, that may be summed sequentially in the type of the data.
_SHORT = 1 << 16
# For fewer elements a call of the kernel costs more than another pass over the data.
_FEW = 1 << 12
_backward: Any = torch.ops.aten.native_batch_norm_backward.default
_SUMS_ALONE = (False, True, True)


class Rows:
    """Sums of tensors of a ``shape`` over ``dims``, which are kept with extent 1.

    A row has the elements along the trailing dimensions of ``dims``. torch sums a row, or short pieces of it,
    in the type of the data. The sums of several pieces and rows are added in float64.
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        outer = len(shape)
        while outer and outer - 1 in dims:
            outer -= 1
        self.shape = tuple(1 if d in dims else n for d, n in enumerate(shape))
        self._dims, self._trailing = tuple(dims), tuple(range(outer, len(shape)))
        self._rows, self.length = tuple(shape[:outer]), prod(shape[outer:])
        self._number, self._few = prod(self._rows), prod(shape) < _FEW
        # Number of pieces per row, of equal length: a power of two.
        pieces = 1
        while self.length // pieces > _SHORT and self.length % (2 * pieces) == 0:
            pieces *= 2
        self._pieces, self._fit = pieces, 0 < self.length // pieces <= _SHORT
        self._in_pieces = (*self._rows, pieces, self.length // pieces)
        self._outer = tuple(d for d in dims if d < outer and shape[d] != 1)
        # Shape of the sums of rows, and whether each sum has one row.
        self._per_row, self._single = (*self._rows, *(1,) * len(self._trailing)), not self._outer
        # The kernel assumes another layout for rows of one element, and is wrong there.
        self._by_kernel = not self._few and self.length // pieces >= 2
        self._flat = (1, self._number * pieces, self.length // pieces)
        # Whether tensors have the kernel's shape without a reshape.
        self._as_is = pieces == 1 and outer == 2 and shape[0] == 1

    def sums(self, x: Tensor) -> Array:
        """Sums of elements."""
        if not self._trailing:
            return x.sum(self._dims, True, dtype=torch.float64).numpy()
        # torch sums pairwise: exact enough in the type of the data, and ten times as fast as in float64.
        found = x.sum(self._trailing, True).numpy()
        return found if self._single else self._added(found, 1)

    def squares(self, x: Tensor) -> Array:
        """Sums of squares of elements."""
        if not self._trailing or not self._fit:
            return self.sums(x.square())
        if self._pieces == 1:
            norms = torch.linalg.vector_norm(x, 2, self._trailing, True)
        else:
            norms = torch.linalg.vector_norm(x.reshape(self._in_pieces), 2, -1)
        found = norms.numpy()
        found = np.multiply(found, found, dtype=np.float64)
        return found if self._single and self._pieces == 1 else self._added(found, self._pieces)

    def products(self, a: Tensor, b: Tensor, mean: Tensor) -> tuple[Array, Array]:
        """Sums of ``a`` and of ``a * (b - mean)``; ``mean`` has extent 1 in the summed dimensions."""
        if not self._by_kernel:
            return self.sums(a), self.sums(a * (b - mean))
        # torch's kernel of batch norm: one pass, without a tensor of products.
        number, pieces = self._number, self._pieces
        if mean.numel() != number:
            mean = mean.expand(*self._rows, *(1,) * len(self._trailing))
        flat = mean.reshape(number)
        if pieces > 1:
            flat = flat.repeat_interleave(pieces)
        as_is = self._as_is and a.is_contiguous() and b.is_contiguous()
        _, products, sums = _backward(
            a if as_is else a.reshape(self._flat),
            b if as_is else b.reshape(self._flat),
            None,
            None,
            None,
            flat,
            _ones(number * pieces, flat.dtype),
            True,
            0.0,
            _SUMS_ALONE,
        )
        total = self._added(sums.numpy(), pieces) if self._fit else self.sums(a)
        return total, self._added(products.numpy(), pieces)

    def _added(self, pieces: Array, number: int) -> Array:
        # Sum of the pieces of each row, number of them, and of rows.
        if number > 1:
            pieces = np.add.reduce(pieces.reshape(*self._rows, number), -1, np.float64)
        if pieces.shape != self._per_row:
            pieces = pieces.reshape(self._per_row)
        return pieces if self._single else np.add.reduce(pieces, self._outer, np.float64, keepdims=True)


class _Quiet(threading.local):
    # numpy keeps its error state in the context: to enter a prepared context costs a fifth of np.errstate.
    def __init__(self) -> None:
        self.context = contextvars.Context()
        self.context.run(np.seterr, all="ignore")


_QUIET = _Quiet()


def without_fp_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Function in which numpy ignores infinities and NaN; such functions must not call each other."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return np.errstate(all="ignore")(function)

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        return _QUIET.context.run(function, *args, **kwargs)

    return quiet


@cache
def _ones(number: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(number, dtype=dtype)


# Types that numpy computes in here; torch converts others from and to float64.
FLOATS = (torch.float32, torch.float64)
# Up to so many ranks, and so many bytes received per rank, each rank sends its values to all others.
_ROUND_RANKS, _ROUND_NBYTES = 32, 1 << 20
# Values of up to so many ranks are merged rank by rank; values of more are merged as one array.
_FEW_RANKS = 3


# A value near the mean of each group, which is subtracted from the elements: as a tensor and as an array.
Shift = tuple[Tensor, Array]
# Mean and variance of each group, in float64; if centred also the shifted local tensor, and each run's shift.
Moments = tuple[Array, Array, Tensor | None, Sequence[Shift]]


def as_type(values: Array, dtype: torch.dtype) -> Tensor:
    """Values as a tensor of a type, rounded; a view if they have this type."""
    if dtype not in FLOATS:
        return torch.from_numpy(values).to(dtype)
    # For few values, numpy takes a quarter of torch's time.
    kind = NUMPY[dtype]
    return torch.from_numpy(values if values.dtype == kind else values.astype(kind))


class LocalRun:
    """A run of the local tensor, and values that are equal in all calls of a normalisation.

    ``reduced`` sums over a group's part of the run. ``uniform`` sums over the reduced dimensions along which
    the parameters do not vary; without such dimensions the normalisation is ``elementwise``. ``mean`` and
    ``squares`` are this run's part of the values to send to the other ranks.
    """

    def __init__(self, run: ChannelRun, axes: NormAxes, local: tuple[int, ...], pair: Array) -> None:
        self._run, self.whole = run, run.channels is None
        self.shape = tuple(run.of(torch.empty(local, device="meta")).shape)
        self.axes, self.elementwise = axes, not axes.uniform
        self.reduced, self.uniform = Rows(self.shape, axes.reduced), Rows(self.shape, axes.uniform)
        self.length, self.empty = prod(self.shape[d] for d in axes.reduced), 0 in self.shape
        self.mean, self.squares = map(self.of_groups, pair)
        self.column = [n if d in axes.weighted else 1 for d, n in enumerate(self.shape)]
        # Reduced dimensions along which the weight varies.
        self.in_group = tuple(d for d in axes.reduced if d in axes.weighted)
        # Memory of rounded().
        self._rounded: tuple[Array, Tensor] | None = None
        # Dimensions that a parameter's gradient is summed over, beside the uniform ones; and its shape.
        self.instances = tuple(d for d in axes.instances(len(self.shape)) if self.shape[d] != 1)
        self.extents = [self.shape[d] for d in axes.weighted] if self.whole else [-1]

    def of(self, tensor: Tensor) -> Tensor:
        """View of the run."""
        return tensor if self.whole else self._run.of(tensor)

    def of_groups(self, values: Array) -> Array:
        """The run's part of values per group; a view."""
        return values if self.whole else self._run.of_groups(values)

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """The run's part of a parameter, shaped to broadcast to the view."""
        return (parameter if self.whole else self._run.of(parameter, 0)).reshape(self.column)

    def column_of(self, parameter: Tensor) -> Array:
        """The run's part of a parameter as an array."""
        values = parameter.data
        # numpy does not know all types.
        if values.dtype not in FLOATS:
            values = values.to(torch.float64)
        if not self.whole:
            values = self._run.of(values, 0)
        return values.numpy().reshape(self.column)

    def rounded(self, values: Array, dtype: torch.dtype) -> Tensor:
        """Values per row in the type of the data; valid until the next call."""
        if self._rounded is None or self._rounded[0].shape != values.shape:
            memory = torch.empty(values.shape, dtype=dtype)
            self._rounded = memory.numpy(), memory
        array, memory = self._rounded
        array[...] = values
        return memory

    def compute_moments(self, x: Tensor, out: Tensor | None) -> Shift:
        """Write mean and squares of the elements; return a shift, and write ``x`` minus it to ``out`` if any.

        Squares are about the local mean, so a large mean hides no small variance. Without ``out`` both the
        shift and the mean are zero.
        """
        if out is None or self.empty:
            if not self.empty:
                self.squares[...] = self.reduced.squares(self.of(x))
            nothing = torch.zeros(self.reduced.shape, dtype=x.dtype)
            return nothing, nothing.numpy()
        if not self.whole:
            x, out = self._run.of(x), self._run.of(out)
        middle = x.mean(self.axes.reduced, True)
        mean = middle.numpy()
        torch.sub(x, middle, out=out)
        # The sum of the shifted elements corrects the rounding of the mean. The squares of constant elements
        # must not be negative by rounding.
        rest = self.reduced.sums(out)
        left = np.divide(rest, self.length, dtype=np.float64)
        np.add(mean, left, out=self.mean)
        squares = np.subtract(self.reduced.squares(out), np.multiply(left, rest, out=left), out=self.squares)
        np.maximum(squares, 0, out=squares)
        return middle, mean


class Statistics:
    """Mean and variance of groups over the ranks that share them, and the two sums of the backward.

    All groups travel together, in float64: in one exchange, or two in the forward of many ranks or groups.
    Results are bitwise equal on all sharing ranks. Local to make, on all of these ranks. A direction has
    segment memory from its first use, or from ``connect``. If not ``centred``, the mean is zero and the
    variance is about zero.
    """

    def __init__(self, site: CallSite, axes: NormAxes, groups: StatisticGroups, centred: bool) -> None:
        self.machine, self.name = machine, _ = site
        self.groups, self.axes, self.centred = groups, axes.in_run, centred
        self.trace = machine.trace
        number = len(groups.ranks)
        self._alone = number == 1
        self._title = f"{self.name} (norm)"
        self._in_one_round = number <= _ROUND_RANKS and number * groups.nbytes <= _ROUND_NBYTES
        self.total: Array = groups.total.clamp(min=1).numpy()
        self._counts: Array = groups.counts.numpy()
        if self._in_one_round:
            # Of the shape of the values: numpy takes several times as long to broadcast.
            self.total = np.broadcast_to(self.total, groups.shape).copy()
            self._counts = np.broadcast_to(self._counts, (number, *groups.shape)).copy()
        self._shares = self._counts / self.total
        self._mine = groups.ranks.index(machine.rank)
        # Values that this rank sends: means of its elements, and squares about them.
        self._pair: Array = np.zeros((PAIR, *groups.shape))
        self._row = self._pair.reshape(-1)
        # Cache of _halves: there are few buffers, and they stay.
        self._views: list[tuple[Array, tuple[Array, Array]]] = []
        self.runs = [LocalRun(run, self.axes, groups.local, self._pair) for run in groups.runs]
        self._complete = all(run.whole for run in self.runs) and bool(self.runs)

    @cached_property
    def _round(self) -> AllPush:
        count = PAIR * prod(self.groups.shape)
        segments, ranks = self.machine.segments, self.groups.ranks
        everyone = AllPush(segments, ranks, count, np.float64, self._title)
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

        ``x`` is the local tensor, in the type of the computation and without a graph. ``mark`` is for traces.
        """
        mark("local")
        shifted = result_like(x) if self.centred else None
        by = [run.compute_moments(x, shifted) for run in self.runs]
        mean, squares = self._merge(self._pair, mark)
        return mean, squares / self.total, shifted, () if shifted is None else by

    def _merge(self, pair: Array, mark: Callable[[str], object]) -> tuple[Array, Array]:
        # Mean of all ranks' elements and squares about it, from each rank's mean and the squares about that.
        if self._alone:
            return pair[0].copy(), pair[1]
        if not self._in_one_round:
            first, second = self._two_sums
            mean = _start(first, self._shares[self._mine] * pair[0])().copy()
            delta = pair[0] - mean
            return mean, _start(second, pair[1] + self._counts[self._mine] * delta * delta)()
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
        if len(rows) > _FEW_RANKS:
            return self._together(rows.reshape(len(rows), *pair.shape))
        return self._one_by_one(self._parts[self._round.epoch & 1])

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

    def pair(self) -> tuple[Array, Array]:
        """Memory for two values per group to sum, zero for groups without elements on this rank."""
        if self._alone:
            return np.zeros(self.groups.shape), np.zeros(self.groups.shape)
        pair = self._halves(self._adjoint.active)
        if not self._complete:
            for values in pair:
                values[...] = 0
        return pair

    def sum(self, pair: tuple[Array, Array]) -> Callable[[], tuple[Array, Array]]:
        """Start to sum two values per group, in memory of ``pair()``, over the ranks.

        The returned function waits for the sums and returns them; they are valid until the second next start.
        """
        if self._alone:
            return lambda: pair
        sums = self._adjoint
        sums.start()
        return lambda: self._halves(sums.wait())

    def _halves(self, buffer: Array) -> tuple[Array, Array]:
        for known, pair in self._views:
            if known is buffer:
                return pair
        first, second = buffer.reshape(self._pair.shape)
        self._views.append((buffer, (first, second)))
        return first, second


def _start(sums: Allreduce, values: Array) -> Callable[[], Array]:
    sums.active[:] = values.reshape(-1)
    sums.start()
    return lambda: sums.wait().reshape(values.shape)

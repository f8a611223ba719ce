"""The operation of all normalisations, with the movement of its parameters and running statistics.

A training step of a rank; what travels are two numbers per group in each direction::

    forward     sums of own elements | exchange | scale                           save x
    backward    sums of d_y and d_y * xhat | start | d_weight, d_bias, scale | wait | add what the sums give

The classes, from the outside::

    Normalisation        the operation: brings parameters to the cut of the input
      KeptValues         where parameters are stored, and how they get to the input's cut
      RunningStatistics  the update of running mean and variance, on the ranks that store them
      LocalNorm          forward and backward of this rank's elements, an autograd function
        Statistics       mean and variance over the ranks (``statistics.py``)
        _Scaling         factors per group and per row, of one forward
        _Gradient        what the backward computes

In evaluation, with running statistics, torch's own function normalises the block, without a message. Sums and
factors are in float64, elements in the type of the computation, of which there are many more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import (
    RECORDINGS,
    GradientNeeds,
    OperatorFunction,
    anchor,
    first_derivative,
    idle,
)
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import Operation
from distdl_rma.layers.ops.core.result_memory import SMALLEST_NBYTES, result, result_like
from distdl_rma.layers.ops.core.staged import Moves, movement_or_none
from distdl_rma.layers.ops.core.tensors import as_array, as_tensor
from distdl_rma.layers.ops.norm.fusible import FusibleNorm, Rows
from distdl_rma.layers.ops.norm.statistic_groups import PAIR, Array, NormAxes, StatisticGroups
from distdl_rma.layers.ops.norm.statistics import FLOATS, Shifted, Statistics, as_type, without_fp_errors
from distdl_rma.layers.staging import down, up
from distdl_rma.segments.collectives.allreduce import Allreduce

# Writes the gradient of a parameter, by name, to its place, and returns it there.
Fill = Callable[[str, Tensor], Tensor]
_PARAMETERS = ("weight", "bias")
# One pass over 16-bit floats, which computes in float32.
_normalise_by_constants = torch.ops.aten.native_batch_norm.out
# Two values of each group, such as mean and variance, in float64.
Pair = tuple[Array, Array]


class NormPlan:
    """What is equal in all calls of a normalisation of a local tensor of type ``dtype``.

    ``wide`` is the type of the computation. Parameters have the shape ``extents``; as a ``column`` they
    broadcast to the tensor. Their gradients are also summed over the dimensions ``instances``.
    """

    def __init__(
        self, statistics: Statistics, axes: NormAxes, eps: float, fill: Fill | None, dtype: torch.dtype
    ) -> None:
        self.statistics, self.eps, self.fill = statistics, eps, fill
        self.dtype, self.wide = dtype, sum_dtype(dtype)
        self.elementwise, local = axes.elementwise, statistics.groups.local
        self.column = tuple(n if d in axes.weighted else 1 for d, n in enumerate(local))
        self.extents = tuple(local[d] for d in axes.weighted)
        self.instances = tuple(d for d in axes.instances(len(local)) if local[d] != 1)
        self.instances_of_sums, self.pair = tuple(d + 1 for d in self.instances), (PAIR, *self.extents)
        self.rows: Rows | None = None
        self._pooled = prod(local) * self.wide.itemsize >= SMALLEST_NBYTES
        # Shape (samples, rows, elements) in which torch scales 16-bit floats in one pass; empty if it cannot.
        self.by_rows: tuple[int, ...] = ()
        if dtype != self.wide and not axes.elementwise:
            self.by_rows = _by_rows(local, statistics.rows.shape)
            number = self.by_rows[1] if self.by_rows else 0
            self.standard = torch.zeros(number, dtype=self.wide), torch.ones(number, dtype=self.wide)
            self.nothing = torch.empty(0, dtype=self.wide)

    def memory(self, x: Tensor) -> Tensor | None:
        """Memory for a result like ``x``; None if torch allocates it."""
        return result_like(x) if self._pooled else None

    def widened(self, x: Tensor) -> Tensor:
        """``x`` in the type of the computation: itself, or a copy."""
        return x if x.dtype == self.wide else self.converted(x, self.wide)

    def converted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy of ``x`` in another type."""
        pooled = self._pooled and x.is_contiguous()
        return result(x.shape, dtype, x).copy_(x) if pooled else x.to(dtype)

    def column_of(self, parameter: Tensor) -> Array:
        """The values of a parameter, as a column."""
        values = parameter.data
        # numpy does not know all types.
        if values.dtype not in FLOATS:
            values = values.to(torch.float64)
        return (values if values.is_cpu else down(values)).numpy().reshape(self.column)


class LocalNorm(OperatorFunction):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of the local tensor, in the type of ``x``.

    Mean and variance are those of the input; ``update`` is called with them. If some rank needs the gradient
    of the input, the backward exchanges two sums per group.
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
        update: Callable[[Pair], None] | None,
    ) -> Tensor:
        """Output of the local tensor; blocking."""
        statistics = plan.statistics
        mark = statistics.trace.marks(statistics.name)
        mean, variance, shifted = statistics.of(x.data, mark)
        if update is not None:
            update((mean, variance))
        mark("scale")
        scaling = _Scaling(plan, x, (mean, variance), weight, shifted)
        y = scaling.output(x.data, None if shifted is None else shifted.tensor, bias)
        mark("")
        ctx.save_for_backward(x, weight)
        ctx.scaling, ctx.machine, ctx.depends = scaling, statistics.machine, needs_x
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Gradients; blocking if any rank needs the gradient of the input."""
        # In a checkpoint this access runs the forward again.
        x, _ = ctx.saved_tensors
        return LocalNorm._gradients(ctx, x, d_y)

    @staticmethod
    @without_fp_errors
    def _gradients(ctx: Any, x: Tensor, d_y: Tensor) -> tuple[Any, ...]:
        plan, scaling = ctx.scaling.plan, ctx.scaling
        statistics = plan.statistics
        needs_x, *needs_parameters = ctx.needs_input_grad[:3]
        mark = statistics.trace.marks(statistics.name, backward=True)
        d_x = arrive = None
        mark("local")
        part = _Gradient(scaling, x, d_y)
        if ctx.depends:
            pair = statistics.pair()
            part.write_sums(pair)
            mark("")
            arrive = statistics.sum(pair)
        mark("scale")
        d_parameters: list[Tensor | None] = [None, None]
        if needs_parameters[0] or needs_parameters[1]:
            d_parameters = part.of_parameters(needs_parameters, ctx.dtypes)
        if needs_x:
            d_x = part.scaled()
        mark("")
        if arrive is not None:
            sums = arrive()
            if d_x is not None:
                mark("fuse")
                part.finish(d_x, sums)
                mark("")
        if d_x is not None and d_x.dtype != plan.dtype:
            d_x = plan.converted(d_x, plan.dtype)
        return d_x, *d_parameters, *(None,) * 4


class _Scaling:
    """Values per group and per row, for forward and backward.

    Three multiplications and additions per element become one of each: ``y = x * factor + offset``.

    ``factor = weight / sqrt(variance + eps)`` has one value per row. If the normalisation is elementwise,
    it excludes the weight, by which the result is multiplied afterwards. ``shift`` is subtracted before the
    multiplication, ``rest = mean - shift`` after.
    """

    def __init__(
        self, plan: NormPlan, like: Tensor, moments: Pair, weight: Tensor | None, shifted: Shifted | None
    ) -> None:
        mean, variance = moments
        groups = plan.statistics.groups
        self.plan, self.shift = plan, None if shifted is None else shifted.of_rows
        inverse = variance + plan.eps
        np.reciprocal(np.sqrt(inverse, out=inverse), out=inverse)
        rest = mean if shifted is None else mean - shifted.shift
        self.of_groups = inverse, rest
        self.inverse, self.rest = groups.spread(inverse), groups.spread(rest)
        # The weight of each row; or that of each element.
        self.weight: Array | None = None
        self.of_elements: Tensor | None = None
        self.factor = self.inverse
        if weight is not None and plan.elementwise:
            self.of_elements = weight.detach().reshape(plan.column).to(plan.wide)
        elif weight is not None:
            self.weight = plan.column_of(weight).astype(np.float64)
            self.factor = self.inverse * self.weight
        self.rounded_factor = as_type(self.factor, plan.wide, like)

    def standardise(self, x: Tensor, out: Tensor | None, bias: Array | None = None) -> Tensor:
        """``(x - rest) * factor + bias`` of the shifted elements ``x``, in the memory of ``out``, if any."""
        out = torch.mul(x, self.rounded_factor, out=out)
        if self.plan.statistics.centred:
            rest = self.rest * self.factor
            bias = np.negative(rest, out=rest) if bias is None else bias - rest
        return out if bias is None else out.add_(as_type(bias, self.plan.wide, x))

    def output(self, x: Tensor, shifted: Tensor | None, bias: Tensor | None) -> Tensor:
        """The output for the elements ``x``; in the memory of the shifted elements, if any."""
        plan = self.plan
        if shifted is None and plan.by_rows and x.is_cpu and x.is_contiguous():
            return self._in_one_pass(x, bias)
        if shifted is None and x.dtype == plan.wide:
            wide, out = x, plan.memory(x)
        else:
            wide = out = plan.widened(x) if shifted is None else shifted
        if not plan.elementwise:
            y = self.standardise(wide, out, None if bias is None else plan.column_of(bias))
        else:
            y = self.standardise(wide, out)
            if self.of_elements is not None:
                y.mul_(self.of_elements)
            if bias is not None:
                y.add_(bias.detach().reshape(plan.column).to(plan.wide))
        return y if y.dtype == plan.dtype else plan.converted(y, plan.dtype)

    def _in_one_pass(self, x: Tensor, bias: Tensor | None) -> Tensor:
        plan, added = self.plan, self.rest * -self.factor
        if bias is not None:
            added += plan.column_of(bias)
        values = [as_type(of_rows, plan.wide).view(-1) for of_rows in (self.factor, added)]
        y = result_like(x)
        # In evaluation the kernel saves nothing.
        saved = plan.nothing
        of_rows = {"out": y.view(plan.by_rows), "save_mean": saved, "save_invstd": saved}
        _normalise_by_constants(x.view(plan.by_rows), *values, *plan.standard, False, 0.0, 0.0, **of_rows)
        return y


class _Gradient:
    """The backward of the local tensor.

    With ``inv = 1 / sqrt(variance + eps)``, ``xhat = (x - mean) * inv``, ``g = d_y * weight`` and means over
    a group::

        d_x = inv * (g - mean(g) - xhat * mean(g * xhat))

    ``sums`` are those of ``d_y`` and ``d_y * xhat`` of each row; if elementwise, of ``g`` and ``g * xhat``.
    """

    def __init__(self, scaling: _Scaling, x: Tensor, d_y: Tensor) -> None:
        plan = scaling.plan
        if scaling.shift is not None or plan.elementwise:
            x, d_y = plan.widened(x), plan.widened(d_y)
        self.scaling, self.plan, self.d_y = scaling, plan, d_y
        self.shifted = x if scaling.shift is None else torch.sub(x, scaling.shift, out=plan.memory(x))
        self.g = d_y if scaling.of_elements is None else d_y * scaling.of_elements
        self.sums = plan.statistics.rows.sums(self.g, self.shifted)
        total, product = self.sums
        product -= scaling.rest * total
        product *= scaling.inverse

    def of_parameters(self, needed: Sequence[bool], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
        """Gradients of ``weight`` and ``bias``, where they are needed, also in their places, if any."""
        plan, instances, sums = self.plan, self.plan.instances, self.sums
        found: list[Tensor | None] = [None, None]
        if not plan.elementwise:
            sums = (np.add.reduce(sums, plan.instances_of_sums) if instances else sums).reshape(plan.pair)
        for at, name in enumerate(_PARAMETERS):
            if not needed[at]:
                continue
            if plan.elementwise:
                values = self.d_y if at else self.scaling.standardise(self.shifted, None).mul_(self.d_y)
                values = (values.sum(instances) if instances else values).reshape(plan.extents).to(dtypes[at])
            else:
                values = as_type(sums[1 - at], dtypes[at], self.d_y)
            found[at] = values if plan.fill is None else plan.fill(name, values)
        return found

    def write_sums(self, pair: Array) -> None:
        """Write the sums of ``g`` and of ``g * xhat`` over the local part of each group."""
        weight = self.scaling.weight
        self.plan.statistics.groups.sums(self.sums if weight is None else self.sums * weight, pair)

    def scaled(self) -> Tensor:
        """The part of the gradient of the input that needs no sums: ``inv * g``."""
        plan, g = self.plan, self.g
        if g.dtype != plan.wide:
            return plan.widened(g).mul_(self.scaling.rounded_factor)
        return torch.mul(g, self.scaling.rounded_factor, out=plan.memory(self.shifted))

    def finish(self, d_x: Tensor, sums: Array) -> None:
        """Add what follows from the sums of ``g`` and ``g * xhat`` to the gradient of the input.

        ``x - mean = shifted - rest``, so this is ``slope * shifted - (inv * mean(g) + slope * rest)`` with
        ``slope = -inv**2 * mean(g * xhat)``.
        """
        plan, statistics = self.plan, self.plan.statistics
        inverse, rest = self.scaling.of_groups
        of_groups = sums * (inverse / -statistics.total)
        offset, slope = of_groups
        slope *= inverse
        offset -= slope * rest
        of_rows = statistics.groups.spread(of_groups)
        added, factor = as_type(of_rows, plan.wide, d_x).unbind()
        shifted = self.shifted if self.shifted.dtype == plan.wide else plan.widened(self.shifted)
        d_x.addcmul_(shifted, factor)
        if statistics.centred:
            d_x.add_(added)


def _by_rows(local: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    # (samples, rows, elements), if values of the shape ``rows`` are equal along the first and the last
    # dimensions of the local tensor only; else nothing.
    first, last = 0, len(local)
    while last and rows[last - 1] == 1:
        last -= 1
    while first < last and rows[first] == 1:
        first += 1
    if 0 in local or tuple(rows[first:last]) != tuple(local[first:last]):
        return ()
    return prod(local[:first]), prod(local[first:last]), prod(local[last:])


RUNNING = ("running_mean", "running_var")
_BACK = "batch statistics"
# Ranks that share statistics, per rank of the partition.
Sharing = Mapping[int, tuple[int, ...]]


# What a group needs more than one of, for messages.
_SEVERAL = {
    "batch_norm": "value per channel is needed in training",
    "instance_norm": "spatial element is needed",
    "group_norm": "value per group is needed",
}


def axes_of(name: str, dims: int, number: int = 0, channels: int = 1) -> NormAxes:
    """Axes of a function of torch for a tensor with so many dimensions.

    ``number`` is that of the groups, or that of the last dimensions of a layer norm. ``channels`` is the
    dimension of the channels.
    """
    if name in ("layer_norm", "rms_norm"):
        last = tuple(range(dims - number, dims))
        return NormAxes(last, last)
    first = range(channels) if name == "batch_norm" else ()
    behind = range(channels + (name != "group_norm"), dims)
    return NormAxes((*first, *behind), (channels,), number)


@dataclass(frozen=True)
class NormOptions:
    """A kind of normalisation, and the mode of a call.

    ``eps`` is added to the variance; None for the resolution of the type. ``function`` is the name of torch's
    function. A call normalises by the statistics of its input (``by_batch``) or by running ones, and may
    update these (``tracks``).
    """

    axes: NormAxes
    eps: float | None = 1e-5
    function: str = "layer_norm"
    by_batch: bool = True
    tracks: bool = False

    def check(self, source: Decomposition, dtype: torch.dtype, extents: tuple[int, ...]) -> None:
        """Raise ``ShapeError`` if an input does not fit parameters of these extents."""
        if not dtype.is_floating_point:
            raise ShapeError(f"an input of a floating-point type is needed, got {dtype}")
        found = tuple(source.shape[d] for d in self.axes.weighted)
        if found != extents:
            raise ShapeError(
                f"input of global shape {source.shape} has extents {found} in dimensions"
                f" {self.axes.weighted}, the layer takes {extents}"
            )


class KeptValues:
    """Values that vary along the dimensions ``dims`` of the input; stored whole on every rank, or cut.

    Three cases, of which the first costs nothing::

        stored as used      whole, and the input is whole along ``dims``; or cut as the input is
        stored whole        a rank takes its part; gradients are zero elsewhere
        stored cut          in another way than the input: a movement along the line of ranks


    For ranks with a part of the input; local to make. Movements allocate memory at their first use.
    ``as_kept`` says whether this rank uses its stored values as they are.
    """

    def __init__(
        self, site: CallSite, source: Decomposition, dims: tuple[int, ...], store: Decomposition
    ) -> None:
        self._site, self._shape = site, store.shape
        P_x, rank = source.partition, site.machine.rank
        splits = tuple(source.splits[d] for d in dims)
        whole = all(axis is None for axis in store.axes)
        # Slices of this rank's part, if values are stored whole and the input is cut.
        self._part: tuple[slice, ...] | None = None
        # Stored and used decompositions, on the ranks with the same part of the input's other dimensions.
        self._ends: tuple[Decomposition, Decomposition] | None = None
        if whole and any(split.parts > 1 for split in splits):
            self._part = tuple(slice(*source.box(rank).bounds[d]) for d in dims)
        elif not whole and splits != store.splits:
            line = P_x.slab({d: i for d, i in enumerate(P_x.index_of(rank)) if store.axes[d] is None})
            kept = Decomposition(line, store.splits, store.axes)
            self._ends = kept, kept.with_splits(dict(enumerate(splits)))
        self.as_kept = self._part is None and self._ends is None
        self._movements: dict[tuple[str, torch.dtype], Moves | None] = {}

    def to_input(self, key: str, values: Tensor) -> Tensor:
        """Redistribute stored values to the input's cut; differentiable, blocking where they move."""
        if self._part is not None:
            return values[self._part]
        movement = self._movement(key, values.dtype)
        return values if movement is None else movement(values, values.requires_grad)

    def to_store(self, values: Tensor) -> Tensor:
        """Redistribute values from the input's cut to their stored form; blocking where they move.

        Values that are stored whole are zero outside of this rank's part.
        """
        if self._part is not None:
            whole = values.new_zeros(self._shape)
            whole[self._part] = values
            return whole
        movement = self._movement(_BACK, values.dtype)
        return values if movement is None else movement(values)

    def connect(self, parameters: Mapping[str, torch.dtype], back: bool) -> None:
        """Exchange addresses for these names and types, and with ``back`` for ``to_store``; blocking."""
        for key, dtype in (*parameters.items(), *([(_BACK, torch.float64)] if back else [])):
            movement = self._movement(key, dtype)
            if movement is not None:
                movement.connect()

    def _movement(self, key: str, dtype: torch.dtype) -> Moves | None:
        if self._ends is None:
            return None
        if (key, dtype) not in self._movements:
            ends = self._ends[::-1] if key == _BACK else self._ends
            self._movements[key, dtype] = movement_or_none(self._site, *ends, dtype, key)
        return self._movements[key, dtype]


class RunningStatistics:
    """Update of the running statistics by those of a batch, on all ranks that store any by ``store``.

    If the ranks that store a channel (keepers) are not those that computed its batch statistics, the keepers
    sum them. Several sets of ranks may normalise the same channels separately: ``share`` is the weight of
    this rank's set in their mean. ``statistics`` and ``kept`` are given on ranks with a part of the batch.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        axes: NormAxes,
        store: Decomposition,
        share: float,
        statistics: Statistics | None = None,
        kept: KeptValues | None = None,
    ) -> None:
        self._site, self._store, self._share = site, store, share
        self._statistics, self._kept, self._contributes = statistics, kept, False
        if statistics is not None:
            total = statistics.total
            # Factor from the variance to the unbiased variance.
            self._correction = total / np.maximum(total - 1, 1)
            self._contributes = statistics.groups.ranks[0] == site.machine.rank
        self._instances = axes.instances(len(source.shape))
        self._number = max(1, prod(source.shape[d] for d in self._instances))
        self._empty = 0 in (n for d, n in enumerate(source.shape) if d not in axes.weighted)
        # Ranks that store the same channels as this rank.
        self._keepers = store.holders(site.machine.rank)

    @cached_property
    def _sums(self) -> Allreduce | None:
        (machine, name), found = self._site, self._statistics
        if not self._keepers or (found is not None and set(found.groups.ranks) == set(self._keepers)):
            return None
        count = len(RUNNING) * self._store.box(machine.rank).volume
        title = f"{name} (running statistics)"
        return Allreduce(machine.segments, self._keepers, count, np.float64, name=title)

    def connect(self) -> None:
        """Exchange addresses with the other keepers, if they sum batch statistics; blocking."""
        if self._sums is not None:
            self._sums.connect()

    def update(self, running: Mapping[str, Tensor], momentum: float, moments: Pair | None = None) -> None:
        """Mix ``moments``, the batch's mean and variance (None outside of it), into ``running``; blocking.

        Blocking only if the ranks that store a channel are not those that share its statistics.
        """
        batch: Sequence[Tensor] = ()
        if self._kept is not None and moments is not None:
            mean, variance = moments
            unbiased = variance * self._correction
            if self._kept.as_kept and self._sums is None:
                if not self._empty:
                    _mix(running[RUNNING[0]], self._per_channel(mean), momentum)
                    _mix(running[RUNNING[1]], self._per_channel(unbiased), momentum)
                return
            batch = [self._kept.to_store(as_tensor(self._per_channel(values))) for values in (mean, unbiased)]
        if self._sums is not None:
            # One of the ranks that share statistics contributes them.
            contributes = bool(batch) and self._contributes
            total = self._sums(as_array(torch.cat(list(batch)) * self._share) if contributes else 0)
            batch = as_tensor(total).tensor_split(len(RUNNING))
        # A batch without elements changes nothing. Where channels are cut, a rank outside stores none.
        if not batch or self._empty:
            return
        for key, new in zip(RUNNING, batch, strict=True):
            _mix(running[key], as_array(new), momentum)

    def _per_channel(self, values: Array) -> Array:
        # This rank's term of the mean over the samples.
        if self._instances:
            values = np.add.reduce(values, self._instances) / self._number
        return values.reshape(-1)


def _mix(running: Tensor, new: Array, momentum: float) -> None:
    # As torch's lerp, in float64.
    if not running.is_cpu:
        running.copy_(running.double().lerp(up(torch.from_numpy(new), running.device), momentum))
        return
    old = running.numpy() if running.dtype in FLOATS else as_array(running.to(torch.float64))
    delta = new - old
    mixed = old + momentum * delta if momentum < 0.5 else new - (1 - momentum) * delta
    # torch copies: it then detects changes of tensors that a graph has saved.
    running.copy_(torch.from_numpy(mixed))


class Normalisation(Operation):
    """Normalisation of a split tensor; the output has the shape, type and decomposition of the input.

    Ranks outside of the input's partition call it too: they may store running statistics.

    A call passes ``weight`` and ``bias``, if there are any. It passes ``running_mean`` and ``running_var`` to
    normalise by them or, together with ``momentum``, to update them in place. These tensors are this rank's
    part by ``store``: whole on every rank, or cut along the grid.

    ``parameters`` are the names and types of the parameters. ``sharing`` restricts the ranks that share
    statistics. ``fill`` writes the gradient of a parameter to its place, if the rank uses the parameter as it
    is stored.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        dtype: torch.dtype,
        options: NormOptions,
        store: Decomposition,
        parameters: Mapping[str, torch.dtype],
        sharing: Sharing | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.site, self.source, self.output, self.options = site, source, source, options
        options.check(source, dtype, store.shape)
        axes, rank = options.axes, site.machine.rank
        fewest, share = self._narrowed(sharing)
        if fewest == 1 and options.by_batch and options.function in _SEVERAL:
            raise ShapeError(f"more than 1 {_SEVERAL[options.function]}, the global input is {source.shape}")
        self.eps = torch.finfo(sum_dtype(dtype)).eps if options.eps is None else options.eps
        self._parameters = parameters
        self.statistics: Statistics | None = None
        self.kept: KeptValues | None = None
        if source.partition.active:
            groups = StatisticGroups(axes, source, rank, None if sharing is None else sharing[rank])
            self.statistics = Statistics(site, groups, centred=options.function != "rms_norm")
            self.kept = KeptValues(site, source, axes.weighted, store)
            fill = fill if self.kept.as_kept else None
            self._plan = NormPlan(self.statistics, axes, self.eps, fill, dtype)
            if dtype != torch.float64:
                self._plan.rows = Rows.of(self.statistics, axes, source)
        self.running: RunningStatistics | None = None
        if options.tracks:
            self.running = RunningStatistics(site, source, axes, store, share, self.statistics, self.kept)

    def _narrowed(self, sharing: Sharing | None) -> tuple[int, float]:
        # Number of elements of the smallest group with any; and 1 over the number of non-empty sets of ranks
        # that normalise the same channels separately, 0 if this rank's set is empty.
        source, axes, rank = self.source, self.options.axes, self.site.machine.rank
        if axes.groups:
            return prod(source.shape) // axes.groups, 1.0
        fewest = prod(source.shape[d] for d in axes.reduced)
        if sharing is None:
            return fewest, 1.0
        counts = {
            ranks: int(StatisticGroups(axes, source, ranks[0], ranks).total.max())
            for ranks in set(sharing.values())
        }
        fewest = min((count for count in counts.values() if count), default=fewest)
        if rank not in sharing:
            return fewest, 1.0
        channels = source.splits[axes.weighted[0]]
        together = axes.ranks_sharing(source.partition, rank, channels)
        beside = {sharing[other] for other in together if counts[sharing[other]]}
        return fewest, 1 / len(beside) if sharing[rank] in beside else 0.0

    def connect(self) -> None:
        """Exchange addresses with all peers of this rank; blocking."""
        options, wanted = self.options, dict(self._parameters)
        if not options.by_batch:
            wanted |= dict.fromkeys(RUNNING, torch.float64)
        if self.statistics is not None and self.kept is not None:
            if options.by_batch:
                self.statistics.connect()
            self.kept.connect(wanted, options.tracks)
        if self.running is not None:
            self.running.connect()

    def __call__(
        self,
        needs: GradientNeeds,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Normalise a local shard, and update running statistics, also on ranks outside; blocking."""
        statistics, kept, running = self.statistics, self.kept, self.running
        if statistics is None or kept is None:
            if running is not None:
                running.update(others, others["momentum"])
            return idle(x, (weight, bias))
        if not kept.as_kept:
            weight = None if weight is None else kept.to_input("weight", weight)
            bias = None if bias is None else kept.to_input("bias", bias)
        if not self.options.by_batch:
            # Running statistics of all types move as float64.
            found = [kept.to_input(key, others[key].to(torch.float64)) for key in RUNNING]
            wide = self._plan.wide
            values = [None if v is None else v.to(wide) for v in (*found, weight, bias)]
            alone = self.options.axes.weighted == (0,)
            y = by_constants(x.unsqueeze(0) if alone else x, values, self.eps)
            return y.squeeze(0) if alone else y
        update = None if running is None else partial(running.update, others, others["momentum"])
        root = None if x.requires_grad else anchor(needs.any)
        # Autocast has no effect on the functions that these call.
        fuses = RECORDINGS and RECORDINGS[-1].fuses and self._plan.rows is not None
        local: Any = FusibleNorm if fuses else LocalNorm
        return local.apply(x, weight, bias, root, self._plan, needs.input, update)


def by_constants(x: Tensor, values: Sequence[Tensor | None], eps: float) -> Tensor:
    """Normalise a block (batch, channel, ...) by mean, variance, weight and bias of its channels; local."""
    if not x.numel():
        # torch's function refuses such a tensor.
        return idle(x, values)
    # torch is wrong along an extent of 1 if the tensor, or its gradient, is transposed in memory.
    x = x.contiguous() if 1 in x.shape else x
    mean, variance, weight, bias = values
    y = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)
    return y

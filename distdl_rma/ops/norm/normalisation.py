"""The operation of all normalisations, with the movement of its parameters and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds, OperatorFunction, anchor, first_derivative, idle
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.result_memory import result_like
from distdl_rma.ops.core.staged import Moves, movement_or_none
from distdl_rma.ops.core.tensors import as_array, as_tensor
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.norm.statistics import (
    FLOATS,
    Array,
    LocalRun,
    Shift,
    Statistics,
    as_type,
    without_fp_errors,
)
from distdl_rma.segments.collectives.allreduce import Allreduce

# Writes the gradient of a parameter, by name, to its place, and returns it there.
Fill = Callable[[str, Tensor], Tensor]
_PARAMETERS = ("weight", "bias")
# Two values of each group, such as mean and variance, in float64.
Pair = tuple[Array, Array]


class NormPlan(NamedTuple):
    """Arguments that are equal in all calls of a normalisation of a local tensor of type ``dtype``."""

    statistics: Statistics
    eps: float
    fill: Fill | None
    dtype: torch.dtype
    wide: torch.dtype  # type of the computation


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
        statistics, eps = plan.statistics, plan.eps
        mark = statistics.trace.marks(statistics.name)
        wide = x if x.dtype == plan.wide else x.to(plan.wide)
        mean, variance, shifted, by = statistics.of(wide, mark)
        if update is not None:
            update((mean, variance))
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
        ctx.scalings, ctx.depends = scalings, needs_x
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y if plan.dtype == plan.wide else y.to(plan.dtype)

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
                part.prepare(d_x, statistics.total)
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
        return d_x, *d_parameters, *(None,) * 4


def _whole(name: str, parts: list[_Gradient], dtype: torch.dtype, fill: Fill | None) -> Tensor:
    if len(parts) == 1:
        whole = parts[0].of_parameter(name, dtype)
    else:
        # Runs are consecutive channels.
        wide = [part.of_parameter(name, torch.float64) for part in parts]
        whole = torch.cat([torch.empty(0), *wide]).to(dtype)
    return whole if fill is None else fill(name, whole)


class _Scaling:
    """Values per group and per channel of one run, for forward and backward.

    ``factor = weight / sqrt(variance + eps)`` has one value per group and channel. If the weight varies along
    all reduced dimensions (``elementwise``, as in layer norm), that would be one value per element. Then
    ``factor`` excludes the weight, by which the result is multiplied afterwards.

    ``shift``, a value near the mean, is subtracted before the multiplication, ``rest = mean - shift`` after.
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
        # The weight if elementwise; otherwise the factor contains it, in float64.
        self.weight: Tensor | None = None
        self.factor = self.inverse
        if weight is not None and run.elementwise:
            self.weight = run.of_parameter(weight).to(dtype)
        elif weight is not None:
            self.factor = self.inverse * run.column_of(weight)
        self.rounded_factor = as_type(self.factor, dtype)

    def shifted(self, x: Tensor, out: Tensor) -> Tensor:
        """Elements minus the shift, in ``out``; ``x`` itself if not centred."""
        return torch.sub(x, self.shift, out=out) if self.centred else x

    def standardise(self, x: Tensor, out: Tensor, offset: Array | None = None) -> None:
        """Write ``(x - rest) * factor + offset`` for the shifted elements ``x``."""
        if self.centred:
            rest = self.rest * self.factor
            # Without a weight there is one factor for a group, and a bias for each channel.
            offset = -rest if offset is None else offset - rest
        torch.mul(x, self.rounded_factor, out=out)
        if offset is not None:
            out.add_(self.run.rounded(offset, self.dtype))

    def scale(self, x: Tensor | None, bias: Tensor | None, y: Tensor) -> _Scaling:
        """Write the output of the run to ``y``, which has the shifted input if ``x`` is None; return self."""
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

    ``total`` and ``product`` are the sums of ``d_y`` and of ``d_y * xhat`` over the dimensions along which
    the weight does not vary. If it is elementwise, ``elements`` are ``d_y`` and ``d_y * xhat`` instead.
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
        """Gradient of ``weight`` or ``bias``."""
        run = self.run
        if self.elements is not None:
            values = self.elements[name == "weight"]
            return (values.sum(run.instances) if run.instances else values).reshape(run.extents).to(dtype)
        rows = self.product if name == "weight" else self.total
        sums = np.add.reduce(rows, run.instances) if run.instances else rows
        return as_type(sums.reshape(run.extents), dtype)

    def write_sums(self, pair: Pair) -> None:
        """Write the sums of ``g`` and of ``g * xhat`` over the local part of each group.

        Where the weight is constant in each group, the sums exclude it: ``prepare`` adds this factor.
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

    def prepare(self, d_x: Tensor, total: Array) -> None:
        """Write ``x`` minus its shift; ``total`` is the number of elements of each group."""
        run, scaling = self.run, self.scaling
        scaling.shifted(self.x, d_x if run.whole else run.of(d_x))
        # Factor of the sums; it contains the weight where the weight is constant in each group.
        whole = 1.0 if run.elementwise else scaling.inverse if run.in_group else scaling.factor
        self.per_sum = whole / (total if run.whole else run.of_groups(total))
        self.per_product = -scaling.inverse * self.per_sum

    def finish(self, d_x: Tensor, sums: Pair) -> None:
        """Write the gradient of the input, from the prepared elements and the sums of ``g``, ``g * xhat``.

        ``x - mean = shifted - rest``, so that ``d_x = factor * d_y + slope * shifted - (inv * mean(g) +
        slope * rest)`` with ``slope = -inv**2 * mean(g * xhat)``. If elementwise, ``weight`` takes the place
        of the factor, one ``inv`` is left out everywhere, and the result is multiplied by ``inv``.
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


RUNNING = ("running_mean", "running_var")
_BACK = "batch statistics"
# Ranks that share statistics, per rank of the partition.
Sharing = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class NormOptions:
    """A kind of normalisation, and the mode of a call.

    ``eps`` is added to the variance; None for the resolution of the type. If not ``centred``, the mean is not
    subtracted. A call normalises by the statistics of its input (``by_batch``) or by running ones, and may
    update these (``tracks``). ``several`` names the elements of which a group needs at least two, for the
    error; it is empty if one is enough.
    """

    axes: NormAxes
    eps: float | None = 1e-5
    centred: bool = True
    by_batch: bool = True
    tracks: bool = False
    several: str = ""

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
        """Mix ``moments``, the batch's mean and variance (None outside of it), into ``running``; blocking."""
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
    old = running.numpy() if running.dtype in FLOATS else as_array(running.to(torch.float64))
    delta = new - old
    mixed = old + momentum * delta if momentum < 0.5 else new - (1 - momentum) * delta
    # torch copies: it then detects changes of tensors that a graph has saved.
    running.copy_(torch.from_numpy(mixed))


class Normalisation(Operation):
    """Normalisation of a split tensor; the output has the shape, type and decomposition of the input.

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
        if fewest == 1 and options.by_batch and options.several:
            raise ShapeError(f"more than 1 {options.several}, the global input is {source.shape}")
        self.eps = torch.finfo(sum_dtype(dtype)).eps if options.eps is None else options.eps
        self._parameters = parameters
        self.statistics: Statistics | None = None
        self.kept: KeptValues | None = None
        if source.partition.active:
            groups = StatisticGroups(axes, source, rank, None if sharing is None else sharing[rank])
            self.statistics = Statistics(site, axes, groups, options.centred)
            self.kept = KeptValues(site, source, axes.weighted, store)
            fill = fill if self.kept.as_kept else None
            self._plan = NormPlan(self.statistics, self.eps, fill, dtype, sum_dtype(dtype))
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
        # Autocast has no effect on the functions that LocalNorm calls.
        result: Tensor = LocalNorm.apply(x, weight, bias, root, self._plan, needs.input, update)
        return result


def by_constants(x: Tensor, values: Sequence[Tensor | None], eps: float) -> Tensor:
    """Normalise a block (batch, channel, ...) by mean, variance, weight and bias of its channels; local."""
    if not x.numel():
        # torch's function refuses such a tensor.
        return idle(x, values)
    # torch is wrong for one sample if the tensor, or its gradient, is transposed in memory.
    x = x.contiguous() if len(x) == 1 else x
    mean, variance, weight, bias = values
    y = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)
    return y

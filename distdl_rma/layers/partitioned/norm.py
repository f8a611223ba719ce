"""Distributed batch, instance, group, layer and RMS normalisation.

The layers differ in one thing only: which elements share a mean and a variance. For (batch, channel,
*spatial)::

    batch norm      one channel of all instances        parameters per channel, running statistics
    instance norm   one channel of one instance         the same
    group norm      a group of channels of an instance  parameters per channel
    layer, RMS      the last dimensions                 parameters per element of these

So a layer names its dimensions (``shared``), and the operation does the rest. Ranks *share* statistics if
they hold elements of the same mean; which ranks these are follows from the grid, except if groups of channels
straddle ranks: then it follows from the cuts of the input.

A user's callback may select some of these ranks. That changes what is computed, on purpose: statistics of a
part of the tensor. Each rank's answer is known to this rank only, so it travels with the facts of the call,
and all ranks check all answers (``agreed_sharing``). ``GradientSync`` checks the same callbacks once, when a
model is registered, before it takes memory (``layers/sync/callback_check.py``): there no tensor is known yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import index as as_int
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from distdl_rma.errors import ArgumentError, ConfigurationError, MismatchError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition, alike, grouped
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import GradientNeeds, anchored
from distdl_rma.layers.ops.core.operation import Agreement
from distdl_rma.layers.ops.norm.normalisation import RUNNING, Normalisation, NormOptions, axes_of
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.layers.partitioned.core.agreement import ShapeAgreement
from distdl_rma.layers.partitioned.core.arguments import (
    OF_TENSORS,
    PlacedOptions,
    check_dims,
    placed_options,
    spatial_dims,
    torchs_layer,
)
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, check_weights, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.placement import Placement, cut
from distdl_rma.layers.partitioned.core.refusals import clipped

_RANKS, _NBYTES = "get_ranks_synch_norm", "get_sizeof_norm"


class StatisticsAnswer(NamedTuple):
    """Results of one rank's callbacks for statistics; they travel with the local shape.

    A callback is code of the user, and may raise or return anything. A rank that raised here would leave the
    others in the agreement, so what went wrong is a text, which all ranks raise.
    """

    ranks: Sequence[int] | None = None  # None without a callback
    nbytes: int | None = None  # None without a callback
    problem: str = ""


_NO_CALLBACKS = StatisticsAnswer()


def answer_of_user(callbacks: Mapping[str, Any], rank: int) -> StatisticsAnswer:
    """Call the user's callbacks for statistics, if given; local.

    An empty list of ranks is valid: this rank shares with no other.
    """
    if _RANKS not in callbacks and _NBYTES not in callbacks:
        return _NO_CALLBACKS
    name = _RANKS
    try:
        ranks = tuple(as_int(other) for other in callbacks[name]()) if name in callbacks else None
        name = _NBYTES
        nbytes = as_int(callbacks[name]()) if name in callbacks else None
    except Exception as error:  # noqa: BLE001 - the user's function; all ranks raise it
        problem = f"{name}() on rank {rank} raised, or returned neither a number nor ranks: {error!r}"
        return StatisticsAnswer(problem=clipped(problem))
    if ranks and (rank not in ranks or len(set(ranks)) < len(ranks)):
        wanted = "a list of different ranks with the caller among them is needed"
        return StatisticsAnswer(problem=clipped(f"{_RANKS}() gave {[*ranks]} on rank {rank}: {wanted}"))
    return StatisticsAnswer(ranks, nbytes)


def agreed_sharing(
    axes: NormAxes, source: Decomposition, answers: Mapping[int, StatisticsAnswer]
) -> dict[int, tuple[int, ...]] | None:
    """Ranks that share statistics, by rank of the tensor, from the callbacks of all ranks; None without any.

    A rank without a callback shares with all ranks that hold elements of the same groups. For example, ranks
    0 to 3 have parts of one image. Answers [0, 1], [0, 1], [2, 3], [2, 3] are two halves with statistics of
    their own. Answers [0, 1], [0, 1, 2], ... raise: rank 2 would be in the sum of rank 1 and not in that of
    rank 0.

    Raises
    ------
    ConfigurationError
        On all ranks: if ranks that share do not all name each other and no other rank, or hold no elements of
        the same groups, or if a callback's size is not that of a message.
    """
    if all(answer == _NO_CALLBACKS for answer in answers.values()):
        return None
    for rank, answer in answers.items():
        problem = answer.problem
        if answer.ranks and rank not in source.partition:
            gave = f"{_RANKS}() gave {[*answer.ranks]} on rank {rank}"
            problem = f"{gave}, which has no part of the tensor: it shares its statistics with nobody, []"
        if problem:
            raise ConfigurationError(problem)
    P_x, channels = source.partition, source.splits[axes.weighted[0]]
    possible = {rank: axes.ranks_sharing(P_x, rank, channels) for rank in P_x.ranks}
    sharing = shared_among(possible, {rank: answer.ranks for rank, answer in answers.items()})
    for rank, answer in answers.items():
        wanted = StatisticGroups(axes, source, rank, sharing[rank]).nbytes if rank in P_x else 0
        if answer.nbytes not in (None, wanted):
            raise ConfigurationError(
                f"{_NBYTES}() gave {answer.nbytes} on rank {rank}, one message of its statistics has {wanted}"
                " bytes"
            )
    return sharing


def shared_among(
    possible: Mapping[int, Sequence[int]], said: Mapping[int, Sequence[int] | None]
) -> dict[int, tuple[int, ...]]:
    """Ranks that share statistics with each rank, which may share them with the ``possible`` ones.

    ``said`` are answers of users; without one a rank shares with all. ``ConfigurationError`` as for
    :func:`agreed_sharing`.
    """
    # The ranks that each rank names, and those that name the same: equal if all name each other.
    named = {
        rank: sorted(all_ranks if said.get(rank) is None else said[rank] or [rank])
        for rank, all_ranks in possible.items()
    }
    groups = grouped(tuple(possible), lambda rank: tuple(named[rank]))
    sharing = {rank: group for group in groups for rank in group}
    # Ranks without a callback name all that they could share with, and come last: they may contradict others
    # only because of these.
    for rank in sorted(possible, key=lambda rank: said.get(rank) is None):
        could, does, ranks = possible[rank], sharing[rank], said.get(rank)
        if sorted(does) != named[rank]:
            all_mutual = "ranks that share statistics all name each other, and nobody else"
            problem = f"but the ranks that say the same are {[*does]}: {all_mutual}"
        elif not {*does} <= {*could}:
            problem = f"but only ranks {[*could]} hold elements that share a mean and a variance"
        else:
            continue
        gave = f"rank {rank} shares its statistics with {[*could]}, as its user does not say otherwise"
        if ranks is not None:
            gave = f"{_RANKS}() gave {[*ranks]} on rank {rank}"
        raise ConfigurationError(f"{gave}, {problem}")
    return sharing


class DistributedNorm(OperatorLayer[Normalisation]):
    """Normalisation of a tensor that is split over ranks along any of its dimensions.

    Base of the layers, which differ in the groups of elements that share a mean and a variance. The output
    has the shape, type and cuts of the input. Forward: local statistics, one message to the ranks that share
    them, scale. Backward: one message with two sums. Statistics travel and are merged in float64.

    ``extents`` is the global shape of the parameters. If P_x cuts dimensions of the parameters, these are cut
    too, unless placed ``"replicated"``. Otherwise every rank of the machine has a replica of all parameters.

    Sums of squares cancel in float32 if the mean is large, and ranks with different numbers of elements
    cannot average their variances: so means and variances of parts are merged in float64.
    """

    # Any: torch's classes, from which the layers inherit too, declare different types.
    weight: Any
    bias: Any
    eps: Any
    _allowed = ("cut", "replicated")
    _by_name = (*PlacedOptions.__annotations__,)
    _changeable = ("eps", "momentum", "affine", "track_running_stats", "elementwise_affine")
    function: ClassVar[str]  # torch's, by name

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        kind = type(self).__name__
        own, placement = placed_options(type(self), self._allowed, options)
        like = torchs_layer(type(self), *arguments, **options)
        axes, found = self.shared(like, P_x)
        extents = tuple(map(as_int, found))
        if min(extents, default=-1) < 0:
            raise ArgumentError(f"{kind}: needs at least one extent, and none below 0, got {extents}")
        super().__init__(P_x, **own)
        self.take_over(like)
        self.axes, self.placement = axes, placement
        kept = Placement(Decomposition.replicated(self.machine.partition(), extents))
        # Grid dimensions that cut the parameters.
        cuts = tuple(d for d in axes.weighted if P_x.shape[d] > 1)
        if cuts and placement == "cut":
            splits = tuple(Balanced(n, P_x.shape[d]) for n, d in zip(extents, axes.weighted, strict=True))
            of_grid = tuple(axes.weighted.index(d) if d in cuts else None for d in range(P_x.dim))
            kept = Placement(Decomposition(P_x, splits, of_grid))
        self.store = kept.store
        self.place({"weight": None, "bias": None, **like._parameters}, lambda _key: kept)
        for key, buffer in like._buffers.items():
            varies = buffer is not None and key in RUNNING
            self.register_buffer(key, cut(kept.store, buffer) if varies else buffer)
            if varies and kept.store.cut_dims:
                self.buffer_layouts[key] = kept.store

    def shared(self, like: Any, P_x: Partition) -> tuple[NormAxes, tuple[int, ...]]:
        """Dimensions of statistics and parameters, and extents of the latter, for torch's layer ``like``.

        ``PartitionError`` if the tensor cannot have the dimensions of P_x.
        """
        raise NotImplementedError

    def mode(self) -> dict[str, Any]:
        """Settings of a call beside its input, in JSON's types; equal on all ranks of the call.

        A rank in ``eval()`` beside ranks in ``train()`` would not take part in the sum of statistics.
        """
        return {"eps": None if self.eps is None else float(self.eps)}

    @cached_property
    def _operations(self) -> WeakValueDictionary[tuple[object, ...], Normalisation]:
        # By all that an operation depends on. Momentum, which may change in every call, is not part of it: a
        # schedule of momentum would else plan a new operation, with new memory, in every step. Weak, since
        # plans of the agreement own operations, and evict them.
        return WeakValueDictionary()

    def plan(self, facts: dict[int, InputFacts]) -> Normalisation:
        """Operation for the facts of all ranks; ``MismatchError`` if their modes differ."""
        expected: dict[str, Any] = alike(
            {rank: fact.call_arguments[0] for rank, fact in facts.items()},
            "rank {} has {} but rank {} {}: train() or eval(), track_running_stats, momentum and eps must be"
            " alike on all ranks",
            MismatchError,
        )
        settings = {key: value for key, value in expected.items() if key != "momentum"}
        options = NormOptions(self.axes, function=self.function, **settings)
        source, dtype = source_of(self.P_x, facts)
        options.check(source, dtype, self.store.shape)
        check_weights(dtype, facts, None, sum_dtype(dtype))
        answers = {rank: StatisticsAnswer(*fact.call_arguments[1]) for rank, fact in facts.items()}
        sharing = agreed_sharing(self.axes, source, answers)
        apart = sharing and tuple(sharing.items())
        key = source, dtype, options, apart, tuple(fact.weights for fact in facts.values())
        known = self._operations.get(key)
        if known is None:
            parameters = {name: getattr(self, name).dtype for name in self.placements or ()}
            fill = None if self.placed is None else self.placed.fill
            known = Normalisation(self.site, source, dtype, options, self.store, parameters, sharing, fill)
            self._operations[key] = known
        return known

    def enter(
        self,
        plans: ShapeAgreement[Normalisation],
        xs: Sequence[Tensor],
        weights: Collection[Tensor] = (),
        call_arguments: tuple[Any, ...] | None = None,
        problem: str = "",
    ) -> Agreement[Normalisation]:
        """As in the base, with the mode and the results of this rank's callbacks for statistics."""
        words = self.mode(), answer_of_user(vars(self), self.machine.rank)
        # Without parameters the ranks compare the type of the running statistics, which a program may have
        # converted on some ranks.
        mean = self._buffers.get("running_mean")
        compared = weights if weights or mean is None else (mean,)
        return super().enter(plans, xs, compared, words, problem)

    def leave(self, y: Tensor, x: Tensor, needs: GradientNeeds) -> Tensor:
        """Result in a graph if that of any rank is; a result without elements keeps its shape."""
        return y if y.requires_grad else anchored(y, needs.any)

    def check_callbacks(self, names: Sequence[str], **sizes: int) -> None:
        """As in the base; ranks that take part in calls compare callbacks for statistics in each call."""
        super().check_callbacks(
            [name for name in names if self.agreement is None or name not in (_RANKS, _NBYTES)], **sizes
        )

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share statistics with this one, itself included; empty if none is needed.

        If groups of channels straddle ranks, these are the ranks of the last call, or, before the first call,
        those for a balanced input. A user's callback may select some of these ranks, if all selected ranks
        name each other; it is called in every call of the layer.
        """
        if not self.P_x.active:
            return []
        last, dim = self._last, self.axes.weighted[0]
        balanced = Balanced(self.store.shape[0], self.P_x.shape[dim])
        channels = balanced if last is None else last.source.splits[dim]
        ranks = self.axes.ranks_sharing(self.P_x, self.machine.rank, channels)
        return list(ranks) if len(ranks) > 1 else []

    def get_sizeof_norm(self) -> int:
        """Bytes of one message of statistics in the last forward.

        Before it: for the announced input of a layer that was built from global parameters, otherwise 0.
        """
        if not self.P_x.active:
            return 0
        if self._last is not None and self._last.statistics is not None:
            return self._last.statistics.groups.nbytes
        groups = [StatisticGroups(self.axes, blocks, self.machine.rank) for blocks in self.announced]
        return groups[0].nbytes if groups else 0


class DistributedRunningNorm(DistributedNorm, batchnorm._NormBase):
    """Normalisation per channel that may keep running statistics in torch's buffers; replicas are equal.

    Running statistics are placed as the parameters; if they are not cut, ranks outside of P_x have replicas
    too. Training sends them in one more message, unless all ranks that keep them share the computation.
    Evaluation sends no statistics.

    Always true: replicas of running statistics are bitwise equal, ranks outside of P_x included, since any of
    them may write the checkpoint. So these ranks take part in calls of training (``agreeing``).
    """

    _shown = ("num_features", "eps", "momentum", "affine", "bias", "track_running_stats")

    def agreeing(self) -> tuple[int, ...]:
        """Ranks of P_x; with running statistics all ranks of the machine."""
        ranks = super().agreeing()
        idle = () if self.running_mean is None else self.machine.ranks
        return (*ranks, *(rank for rank in idle if rank not in self.P_x))

    def reset_running_stats(self) -> None:
        """Reset the running statistics; local, must be called on all ranks."""
        batchnorm._NormBase.reset_running_stats(self)

    def statistics_mode(self) -> tuple[bool, bool]:
        """Whether a call normalises by statistics of its input, and whether it updates running statistics."""
        raise NotImplementedError

    def rate(self) -> float:
        """Weight of this batch in the running statistics; called once for each batch that updates them."""
        return float(self.momentum or 0.0)

    def mode(self) -> dict[str, Any]:
        """As in the base, with the statistics that a call normalises by, and the update of running ones."""
        by_batch, tracks = self.statistics_mode()
        momentum = float(self.momentum) if tracks and self.momentum is not None else None
        return super().mode() | {"by_batch": by_batch, "tracks": tracks, "momentum": momentum}

    def run(
        self, agreement: Agreement[Normalisation], xs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, GradientNeeds]:
        """Call the operation, with the running statistics that it uses or updates."""
        operation, needs = agreement.settle()
        mode, named = operation.options, dict[str, Any](weights)
        if mode.tracks or not mode.by_batch:
            named |= {key: self._buffers[key] for key in RUNNING}
        if mode.tracks:
            named["momentum"] = self.rate()
        return operation(needs, *xs, **named), needs


class DistributedBatchNorm(DistributedRunningNorm, batchnorm._BatchNorm):
    """Batch normalisation of a tensor that is split over ranks along any of its dimensions.

    Mean and variance of a channel are those of the global batch and image. In training there must be more
    than one value per channel, counted over all ranks. Local output: of the shape of the local input.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    num_features, eps, momentum, affine, track_running_stats, device, dtype, bias
        As in torch. ``eps`` must be positive.
    placement, weights
        If P_x cuts dimensions of the parameters: ``"cut"``, in the same way, or ``"replicated"`` on all ranks
        of the machine. This also holds for running statistics.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> norm = DistributedBatchNorm2d(P_x, 3)
    >>> y = norm(shard(P_x, torch.rand(2, 3, 16, 16)))
    >>> norm.num_batches_tracked
    tensor(1)
    """

    function = "batch_norm"

    def shared(self, like: Any, P_x: Partition) -> tuple[NormAxes, tuple[int, ...]]:
        """All dimensions but channels are reduced."""
        space = spatial_dims(type(self))
        check_dims(type(self), (2, 3) if space == 1 else (LEADING + space,), P_x=P_x)
        if like.eps <= 0:
            # torch raises in the first call in training, where other ranks wait.
            raise ArgumentError(f"{type(self).__name__}: eps must be positive, got {like.eps}")
        return axes_of(self.function, P_x.dim), (like.num_features,)

    def statistics_mode(self) -> tuple[bool, bool]:
        """By the input in training, and without running statistics. Training updates running statistics."""
        running = self.running_mean is not None
        return self.training or not running, self.training and self.track_running_stats and running

    def rate(self) -> float:
        """``momentum``, or 1 / number of batches if that is None; counts this batch.

        The count is a buffer of torch's layer, so that a checkpoint goes on with the cumulative mean.
        """
        counted = self.num_batches_tracked
        if counted is not None:
            counted.add_(1)
        return super().rate() if counted is None or self.momentum is not None else 1.0 / int(counted)

    @property
    def qconfig(self) -> None:
        """Raise ``UnsupportedError`` in quantisation and in ``nn.SyncBatchNorm.convert_sync_batchnorm``.

        These read this attribute, and would replace the layer by one that normalises each shard by itself.
        """
        raise UnsupportedError(
            f"{self.label!r} shares its statistics over all ranks already, and is not to be converted to"
            " another kind of batch norm"
        )


class DistributedBatchNorm1d(DistributedBatchNorm, nn.BatchNorm1d):
    """Distributed ``torch.nn.BatchNorm1d``; tensors are (batch, channel) or (batch, channel, width)."""


class DistributedBatchNorm2d(DistributedBatchNorm, nn.BatchNorm2d):
    """Distributed ``torch.nn.BatchNorm2d``; tensors are (batch, channel, height, width)."""


class DistributedBatchNorm3d(DistributedBatchNorm, nn.BatchNorm3d):
    """Distributed ``torch.nn.BatchNorm3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedInstanceNorm(DistributedRunningNorm, instancenorm._InstanceNorm):
    """Instance normalisation: as :class:`DistributedBatchNorm`, but for each instance by itself.

    Mean and variance are those of one channel of an instance's global image, which must have more than one
    element. Tensors may have a batch dimension or not.

    Notes
    -----
    Interface document, chapter 4; requirements A19, B11. Document: ``docs/layers/normalization.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> norm = DistributedInstanceNorm2d(P_x, 3, affine=True)
    >>> y = norm(shard(P_x, torch.rand(1, 3, 16, 16)))
    >>> bool(y.mean().abs() < 1e-5)
    True
    """

    function = "instance_norm"

    def shared(self, like: Any, P_x: Partition) -> tuple[NormAxes, tuple[int, ...]]:
        """The spatial dimensions, behind the channels, are reduced."""
        space = spatial_dims(type(self))
        check_dims(type(self), (1 + space, LEADING + space), P_x=P_x)
        return axes_of(self.function, P_x.dim, channels=P_x.dim - space - 1), (like.num_features,)

    def statistics_mode(self) -> tuple[bool, bool]:
        """By the input in training, and without tracking; these calls update running statistics, if any."""
        by_batch = self.training or not self.track_running_stats
        return by_batch, by_batch and self.running_mean is not None


class DistributedInstanceNorm1d(DistributedInstanceNorm, nn.InstanceNorm1d):
    """Distributed ``torch.nn.InstanceNorm1d``; tensors are (batch, channel, width) or (channel, width)."""


class DistributedInstanceNorm2d(DistributedInstanceNorm, nn.InstanceNorm2d):
    """Distributed ``torch.nn.InstanceNorm2d``; tensors are (batch, channel, height, width), or unbatched."""


class DistributedInstanceNorm3d(DistributedInstanceNorm, nn.InstanceNorm3d):
    """Distributed ``torch.nn.InstanceNorm3d``; as (batch, channel, depth, height, width), or unbatched."""


class DistributedGroupNorm(DistributedNorm, nn.GroupNorm):
    """Group normalisation of a tensor that is split over ranks along any of its dimensions.

    Groups of channels may straddle ranks. Local input and output: (batch, channel, ...), of equal shape.
    Arguments are as for :class:`DistributedBatchNorm`, all others as in torch.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> norm = DistributedGroupNorm(P_x, num_groups=2, num_channels=6)
    >>> y = norm(shard(P_x, torch.rand(1, 6, 16, 16)))
    >>> bool(y.mean().abs() < 1e-5)
    True
    """

    function = "group_norm"
    _shown = ("num_groups", "num_channels", "eps", "affine", "bias")

    def shared(self, like: Any, P_x: Partition) -> tuple[NormAxes, tuple[int, ...]]:
        """All dimensions behind the batch are reduced, within a group of channels."""
        kind = type(self).__name__
        check_dims(type(self), OF_TENSORS[LEADING - 1 :], P_x=P_x)
        if like.num_groups < 1:
            raise ArgumentError(f"{kind}: needs at least one group, got num_groups {like.num_groups}")
        return axes_of(self.function, P_x.dim, as_int(like.num_groups)), (like.num_channels,)


class DistributedTrailingNorm(DistributedNorm):
    """Normalisation over the last dimensions of a tensor, ``normalized_shape``."""

    _shown = ("normalized_shape", "eps", "elementwise_affine", "bias")

    def shared(self, like: Any, P_x: Partition) -> tuple[NormAxes, tuple[int, ...]]:
        """The last dimensions share a mean, and each of their elements has its own parameters."""
        shape = like.normalized_shape
        check_dims(type(self), OF_TENSORS[max(0, len(shape) - 1) :], P_x=P_x)
        return axes_of(self.function, P_x.dim, len(shape)), shape


class DistributedLayerNorm(DistributedTrailingNorm, nn.LayerNorm):
    """Layer normalisation of a tensor that is split over ranks along any of its dimensions.

    Local output: of the shape of the local input. If P_x splits normalised dimensions, the ranks that hold
    parts of an instance share its statistics. Arguments are as for :class:`DistributedBatchNorm`, all others
    as in torch; ``normalized_shape`` is global.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))  # cuts the tokens
    >>> norm = DistributedLayerNorm(P_x, 32)
    >>> norm(shard(P_x, torch.rand(2, 10, 32))).shape
    torch.Size([2, 10, 32])
    """

    function = "layer_norm"


class DistributedRMSNorm(DistributedTrailingNorm, nn.RMSNorm):
    """Root mean square normalisation: as :class:`DistributedLayerNorm`, but without mean and bias.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))  # cuts the tokens
    >>> norm = DistributedRMSNorm(P_x, 32)
    >>> norm(shard(P_x, torch.rand(2, 10, 32))).shape
    torch.Size([2, 10, 32])
    """

    function = "rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; ``x`` is the local shard, or a tensor without elements outside of P_x."""
        return super().forward(x)

"""Layers that move tensors between ranks, and compute nothing or sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index as as_int
from typing import Any, ClassVar, TypeVar, Unpack

import torch

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition, groups_onto
from distdl_rma.layers.core.arguments import Callbacks, per_dim
from distdl_rma.layers.core.input_facts import InputFacts, input_dtype, source_of
from distdl_rma.layers.core.layer import nbytes_of
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops import moves
from distdl_rma.ops.core.autograd import GradientNeeds, anchored, deliver, tells_peers
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.tensors import trouble_with
from distdl_rma.ops.moves import (
    CHANNELS,
    Concat,
    StagedMove,
    Subtensors,
    all_gather,
    all_sum_reduce,
    broadcast,
    joined,
    reduce_scatter,
    repartition,
    sum_reduce,
)
from distdl_rma.ops.window_gather import MODES

M = TypeVar("M", bound=Operation)
# One grid dimension or several.
Axes = int | Iterable[int]


class MovementLayer(OperatorLayer[M]):
    """A layer that moves data from P_x to P_y; ``preserve_batch`` as of :class:`Repartition`."""

    def __init__(
        self,
        P_x: Partition | Sequence[Partition],
        P_y: Partition | None = None,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, name=name, **callbacks)
        self.preserve_batch = preserve_batch

    def extra_repr(self) -> str:
        """The partitions, and what else the layer was built with."""
        return f"P_x={self.P_x.shape}, P_y={self.P_y.shape}"

    def built_with(self) -> str:
        """As of every layer, with the ranks, which are not the same for all grids of one shape."""
        return f"{[P.ranks for P in (*self.P_xs, self.P_y)]}, {super().built_with()}"

    def idle_output(self, x: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> torch.Tensor:
        """As of every layer, without the batch size where the results of others lack it."""
        y = super().idle_output(x, others)
        return y if self.preserve_batch or not x.numel() else y.flatten()

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result as the caller gets it; in a graph already if any rank's is."""
        return deliver(y, self.P_y.active, x.shape[0] if self.preserve_batch and x.dim() else None)


class LayerAlongAxes(MovementLayer[StagedMove]):
    """A move among the ranks of P_x that differ in some grid dimensions only: ``axes``, sorted."""

    _argument: ClassVar[str]

    def __init__(
        self,
        P_x: Partition,
        axes: Axes | None,
        keep: Axes | None,
        name: str | None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.axes = chosen_axes(type(self).__name__, P_x, self._argument, axes, keep)
        super().__init__(P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, and the dimensions."""
        return f"P_x={self.P_x.shape}, {self._argument}={self.axes}"


def chosen_axes(kind: str, P: Partition, what: str, axes: Axes | None, keep: Axes | None) -> tuple[int, ...]:
    """Grid dimensions given themselves, or by those that are kept; sorted."""
    given = axes if keep is None else keep
    if given is None or (axes is not None and keep is not None):
        raise ArgumentError(f"{kind}: give either {what} or axes_keep, got {what}={axes}, axes_keep={keep}")
    try:
        listed = [as_int(axis) for axis in (given if isinstance(given, Iterable) else [given])]
    except TypeError as error:
        raise ArgumentError(f"{kind}: axes are integers, got {given}: {error}") from None
    for axis in listed:
        if not -P.dim <= axis < P.dim:
            raise ArgumentError(f"{kind}: axis {axis} is out of range for grid {P.shape}")
    found = {axis % P.dim for axis in listed}
    if len(found) < len(listed):
        raise ArgumentError(f"{kind}: an axis is listed more than once in {listed} for grid {P.shape}")
    return tuple(d for d in range(P.dim) if (d in found) == (keep is None))


class Repartition(MovementLayer[StagedMove]):
    """Move a tensor from one Cartesian partition to another; the result is balanced.

    As of all layers that only move data, a rank's result is memory of its own, also where it is its input.
    The adjoint moves gradients back to where the input came from.

    Parameters
    ----------
    P_x, P_y
        Input and output partition, with as many dimensions as the tensor.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Repartition document; requirement B5.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        if P_x.dim != P_y.dim:
            raise PartitionError(
                f"{type(self).__name__}: P_x has {P_x.dim} dimensions {P_x.shape} but P_y has {P_y.dim}"
                f" {P_y.shape}"
            )
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Blocks as they are to balanced ones."""
        source, dtype = source_of(self.P_x, facts)
        return repartition(self.site, source, self.P_y, dtype)


# The name by which this movement is known as well.
DistributedTranspose = Repartition


class AllGather(LayerAlongAxes):
    """Every rank gets what all ranks have that differ from it in some grid dimensions only.

    A tensor that P_x cuts along all grid dimensions becomes one that it cuts along the others only. Local
    output: whole along the gathered dimensions. The adjoint sums and scatters, along the cuts of the input.
    Flat vectors are gathered, without gradients, by the collective :class:`distdl_rma.segments.Allgather`.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_all_gather
        Dimensions to gather along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_all_gather"

    def __init__(
        self,
        P_x: Partition,
        axes_all_gather: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, axes_all_gather, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Blocks to blocks that are whole along the gathered dimensions."""
        source, dtype = source_of(self.P_x, facts)
        return all_gather(self.site, source, self.axes, dtype)


class ReduceScatter(LayerAlongAxes):
    """Sum what ranks have that differ in some grid dimensions only, and cut the sum along these.

    Local input: whole along the scattered dimensions, equal in shape on the ranks that are summed. Local
    output: the balanced share of the sum, taken in the order of the partition. The adjoint gathers. Of flat
    vectors, without gradients: the collective :class:`distdl_rma.segments.Reducescatter`.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_reduce_scatter
        Dimensions to sum and cut along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_reduce_scatter"

    def __init__(
        self,
        P_x: Partition,
        axes_reduce_scatter: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, axes_reduce_scatter, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Copies along the scattered dimensions to balanced blocks."""
        source, dtype = source_of(self.P_x, facts, replicate=self.axes)
        return reduce_scatter(self.site, source, self.axes, dtype)

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Whole along the scattered dimensions."""
        return Decomposition.balanced(P_x, shape, self.axes)


_SIDES = 2


class HaloExchange(MovementLayer[moves.HaloExchange]):
    """Own shard with the elements of other ranks around it, corners included.

    The global tensor (batch, channel, *spatial) is padded as torch pads it; each rank gets its own part of
    it and ``width`` elements more on either side, in one round, also where a shard is smaller than the
    width. Where a rank's shard is empty in a spatial dimension, so is its result. The adjoint adds every
    gradient to that of the element that was copied.

    Parameters
    ----------
    P_x
        Partition of input and output; grid and tensor have the same dimensions.
    width
        Elements before and behind the shard: one number for all, or for each spatial dimension a number
        or a pair (left, right).
    padding_mode
        What lies beyond the domain: ``"zeros"``, ``"constant"`` (``value``), ``"reflect"``,
        ``"replicate"`` or ``"circular"``.
    value
        Of a constant padding.

    Raises
    ------
    ShapeError
        In a call: also if the global tensor is too small for the mode.

    Notes
    -----
    Convolution document, halo exchange; requirement B9.
    """

    def __init__(
        self,
        P_x: Partition,
        width: int | Iterable[int | Iterable[int]],
        padding_mode: str = "zeros",
        value: float = 0.0,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind = type(self).__name__
        if P_x.dim <= LEADING:
            raise PartitionError(f"{kind}: grid {P_x.shape} needs a batch, a channel and spatial dimensions")
        if padding_mode not in MODES:
            raise ArgumentError(f"{kind}: padding_mode is one of {MODES}, got {padding_mode!r}")
        self.width = _pairs(kind, width, P_x.dim - LEADING)
        self.padding_mode, self.value = padding_mode, value
        super().__init__(P_x, P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, the widths and the padding."""
        padding = f"padding_mode={self.padding_mode!r}, value={self.value}"
        return f"P_x={self.P_x.shape}, width={self.width}, {padding}"

    def plan(self, facts: dict[int, InputFacts]) -> moves.HaloExchange:
        """What windows as wide as both halos read, where every element has a window of its own."""
        source, dtype = source_of(self.P_x, facts)
        mode, value = self.padding_mode, self.value
        return moves.HaloExchange(self.site, source, dtype, self.width, mode, value)


def _pairs(kind: str, width: int | Iterable[int | Iterable[int]], dims: int) -> tuple[tuple[int, int], ...]:
    widths = list(width) if isinstance(width, Iterable) else [width] * dims
    pairs = []
    for entry in widths:
        pair = tuple(entry) if isinstance(entry, Iterable) else (entry, entry)
        if len(widths) != dims or len(pair) != _SIDES:
            raise ArgumentError(
                f"{kind}: width is a number, or for each of {dims} spatial dimensions a number or a pair, got"
                f" {width}"
            )
        before, behind = per_dim(kind, "width", pair, _SIDES, 0)
        pairs.append((before, behind))
    return tuple(pairs)


class _OfSubtensors(MovementLayer[StagedMove]):
    # Dimensions of P_x along which subtensors are summed.
    axes: tuple[int, ...] = ()

    def subtensors(self, facts: dict[int, InputFacts]) -> tuple[Subtensors, torch.dtype]:
        """Subtensors as blocks of one tensor, or their shapes if they form none; and their type."""
        P_x, dtype = self.P_x, input_dtype(self.P_x, facts)
        shapes = {rank: facts[rank].shape for rank in P_x.ranks}
        one = all(extent == 1 or d in self.axes for d, extent in enumerate(P_x.shape))
        if one and len(set(shapes.values())) == 1:
            return Decomposition.replicated(P_x, shapes[P_x.ranks[0]]), dtype
        try:
            return Decomposition.from_local_shapes(P_x, shapes, self.axes), dtype
        except ShapeError:
            # Subtensors may have any shape, whatever the grids are.
            return shapes, dtype

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Subtensors of this shape."""
        return Decomposition.replicated(P_x, shape)


class _Between(_OfSubtensors):
    # Groups of ranks on one side, one rank each on the other.
    _operation: ClassVar[Callable[..., StagedMove]]

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        sums = self._operation is sum_reduce
        sides = (P_x, transpose_src), (P_y, transpose_dest)
        (P_many, flip_many), (P_few, flip_few) = sides if sums else sides[::-1]
        try:
            first, *_ = groups_onto(P_many, P_few, flip_many, flip_few)
        except PartitionError as error:
            raise PartitionError(f"{type(self).__name__}: {error}") from None
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)
        if sums:
            # Ranks of the first group differ in these from the first rank of P_x.
            self.axes = tuple(sorted({d for r in first for d, i in enumerate(P_x.index_of(r)) if i}))

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Groups of ranks to one rank each, or one rank each to groups."""
        source, dtype = self.subtensors(facts)
        flips = self.transpose_src, self.transpose_dest
        return self._operation(self.site, source, self.P_x, self.P_y, dtype, flips)

    def extra_repr(self) -> str:
        """The partitions, and which of them is transposed."""
        flips = f"transpose_src={self.transpose_src}, transpose_dest={self.transpose_dest}"
        return f"{super().extra_repr()}, {flips}"


class SumReduce(_Between):
    """Sum subtensors from P_x to P_y, along the dimensions in which the grid of P_y is 1.

    The grid of P_y is extended to the left with ones; then each dimension equals that of P_x, or is 1.
    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grids are.
    The sum is taken in the order of P_x, the same from run to run; that of short types in float32. Over
    several nodes the sums of the nodes are taken first. The adjoint is :class:`Broadcast`.

    Parameters
    ----------
    P_x, P_y
        Input and output partition.
    transpose_src, transpose_dest
        Whether the grid of P_x, or P_y, is transposed before: who is at (i, j) counts as at (j, i).
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Sum-reduce document; requirement B3.
    """

    _operation = staticmethod(sum_reduce)


class Broadcast(_Between):
    """Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.

    The grid of P_x is extended to the left with ones; then each dimension equals that of P_y, or is 1.
    Subtensors may have any shape, whatever the grids are. Over several nodes each node gets one copy, which
    is handed on there. The adjoint is :class:`SumReduce`: gradients are summed in the order of P_y.

    Parameters
    ----------
    P_x, P_y, transpose_src, transpose_dest, preserve_batch
        As for :class:`SumReduce`.

    Notes
    -----
    Sum-reduce document, read from its end; requirement B3.
    """

    _operation = staticmethod(broadcast)


class AllSumReduce(_OfSubtensors, LayerAlongAxes):
    """Sum the subtensors of ranks that differ in some grid dimensions only; each of them gets the sum.

    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grid is. The
    result is bitwise the same on the ranks that share it and from run to run. The layer is its own adjoint.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_reduce
        Grid dimensions to sum along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_reduce"

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        LayerAlongAxes.__init__(self, P_x, axes_reduce, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Groups of ranks to themselves."""
        source, dtype = self.subtensors(facts)
        return all_sum_reduce(self.site, source, self.P_x, self.axes, dtype)


class DistributedConcat(MovementLayer[Concat]):
    """Concatenation along the channels, dimension 1, of tensors split over ranks in any of their dimensions.

    Local inputs: the shards of this rank. Local output: the balanced shard of the concatenated tensor on
    P_y; where that is the partition of the first input, the batch stays cut as it is there. Where all
    partitions are the same and cut no channels, the shards of the output are those of the inputs, and
    nothing is communicated: then only the ranks that see what is wrong with a call raise; the others learn
    it in their next wait, and the machine cannot be used afterwards.

    Inputs of different types become one type, as in ``torch.cat``. Each travels as it is, and its gradient
    comes back in its own type.

    Parameters
    ----------
    P_xs
        Partition of each input, as many dimensions as the tensors.
    P_y
        Partition of the output; that of the first input if None.

    Notes
    -----
    Interface document, chapter 5; requirement A20.
    """

    def __init__(
        self,
        P_xs: Sequence[Partition],
        P_y: Partition | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind, P_xs = type(self).__name__, tuple(P_xs)
        if not P_xs:
            raise PartitionError(f"{kind}: needs the partition of one input at least, got none")
        P_y = P_xs[0] if P_y is None else P_y
        for which, partition in (*((f"P_xs[{at}]", P_x) for at, P_x in enumerate(P_xs)), ("P_y", P_y)):
            if partition.dim != P_y.dim or partition.dim <= CHANNELS:
                raise PartitionError(
                    f"{kind}: {which} has {partition.dim} dimensions {partition.shape} but P_y {P_y.dim}"
                    f" {P_y.shape}; all need those of the tensors, batch and channels first"
                )
        super().__init__(P_xs, P_y, name=name, **callbacks)
        self._stays = all(P_x == P_y for P_x in P_xs) and P_y.shape[CHANNELS] == 1

    def plan(self, facts: dict[int, InputFacts]) -> Concat:
        """Each input to where its channels are in the output."""
        inputs = []
        for at, P_x in enumerate(self.P_xs):
            try:
                inputs.append(source_of(P_x, {rank: fact.of(at) for rank, fact in facts.items()}))
            except ShapeError as error:
                raise ShapeError(f"input {at}: {error}") from None
        sources, dtypes = zip(*inputs, strict=True)
        return Concat(self.site, sources, dtypes, self.P_y, keep_batch=self.P_xs[0] == self.P_y)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"P_xs={[P_x.shape for P_x in self.P_xs]}, P_y={self.P_y.shape}"

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of all inputs."""
        return sum(nbytes_of(x) for x in inputs)

    @tells_peers
    def connect(  # type: ignore[override]
        self, shapes: Sequence[Sequence[int]] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """As of every layer, with the global shape of each input; ``dtype`` is torch's default if None."""
        given = [None] * len(self.P_xs) if shapes is None else list(shapes)
        if self._stays or self.agreement is None:
            self._count(given)
        pairs = enumerate(zip(self.P_xs, given, strict=False))
        xs = [self.expected(P_x, shape, dtype, at) for at, (P_x, shape) in pairs]
        if not self._stays:
            # One too many is for all ranks to refuse.
            self.connect_for([*xs, *[torch.empty(0)] * (len(given) - len(xs))])

    @tells_peers
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate ``inputs``, the local shards, or tensors without elements outside of a partition."""
        if self.agreement is None:
            self._count(inputs)
        elif self._stays:
            dtype = self._check(inputs)
            return torch.cat([x.to(dtype) for x in inputs], CHANNELS)
        return self.apply_to(*inputs)

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result as the caller gets it; in a graph if any rank's is, wherever the types are not the same."""
        return anchored(super().leave(y, x, needs), needs.any)

    def _count(self, given: Sequence[object]) -> None:
        if len(given) != len(self.P_xs):
            raise self._refuse(f"takes {len(self.P_xs)} inputs, got {len(given)}")

    def _check(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        self._count(inputs)
        for at, x in enumerate(inputs):
            problem = trouble_with(x, f"input {at}")
            if problem:
                raise self._refuse(problem)
        try:
            return joined([tuple(x.shape) for x in inputs], [x.dtype for x in inputs], self.P_y.dim)[1]
        except ShapeError as error:
            raise self._refuse(str(error)) from None

    def _refuse(self, problem: str) -> ShapeError:
        # Nobody else is asked: what is wrong here may be right elsewhere, and the others would wait.
        wrong = ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if self.machine.size > 1 and self.machine.rank in self.members:
            self.machine.fail(wrong)
        return wrong

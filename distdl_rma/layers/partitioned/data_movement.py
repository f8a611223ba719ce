"""Layers that move tensors between ranks, and may sum or concatenate them.

Four ranks on a grid of 2 x 2, with parts a, b, c and d of a tensor. Each layer has its adjoint as backward::

    layer                        before      after                                      adjoint
    Repartition to (4, 1)        a b         rows 1, 2, 3, 4 of the tensor              Repartition back
                                 c d
    AllGather along axis 1       a b         ab ab                                      sums and scatters
                                 c d         cd cd
    ReduceScatter along axis 1   a b         first and second half of a + b             AllGather
                                 c d         first and second half of c + d
    AllSumReduce along axis 1    a b         a+b a+b                                    itself
                                 c d         c+d c+d
    SumReduce to one rank        a b c d     a+b+c+d                                    Broadcast

The first three move blocks of one tensor, so that shards must form a grid. The last two, and Broadcast, move
*subtensors*: each rank has a tensor of its own, and only those that are summed must be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import index as as_int
from typing import Any, ClassVar, TypeVar, Unpack

import torch
from numpy.lib.array_utils import normalize_axis_tuple

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition, groups_onto
from distdl_rma.layers.ops import data_movement
from distdl_rma.layers.ops.core.autograd import reports_failures
from distdl_rma.layers.ops.core.operation import Operation
from distdl_rma.layers.ops.data_movement import (
    CHANNELS,
    Concat,
    StagedMove,
    Subtensors,
    all_sum_reduce,
    broadcast,
    redistribution,
    sum_reduce,
)
from distdl_rma.layers.ops.window_gather import PADDING_MODES
from distdl_rma.layers.partitioned.core.arguments import LayerOptions, check_dims
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, input_dtype, source_of
from distdl_rma.layers.partitioned.core.layer import DistributedLayer, nbytes_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.refusals import attributed
from distdl_rma.layers.split import layout as lay

M = TypeVar("M", bound=Operation)
# One grid dimension or several; None if the other argument says which.
Axes = int | Iterable[int] | None


class MovementLayer(OperatorLayer[M]):
    """A layer that moves data from P_x to P_y; ``preserve_batch`` as in :class:`Repartition`.

    Its results are new memory, also where nothing moves: a layer after it may change them in place.
    """

    def __init__(
        self,
        P_x: Partition | Sequence[Partition],
        P_y: Partition | None = None,
        preserve_batch: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(P_x, P_y, **options)
        self.preserve_batch = preserve_batch

    def arguments_text(self) -> str:
        """As in the base, with all partitions and their ranks: some of one shape have different ranks."""
        return f"{[(P.shape, P.ranks) for P in (*self.P_xs, self.P_y)]}, {super().arguments_text()}"

    def idle_output(self, x: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> torch.Tensor:
        """As in the base, without the batch size unless ``preserve_batch``."""
        y = super().idle_output(x, others)
        return y if self.preserve_batch or not x.numel() else y.flatten()


class _OfBlocks(MovementLayer[StagedMove]):
    # A movement of one tensor, from its blocks on P_x to other blocks.
    # Dimensions of P_x along which the ranks have terms of a sum, in place of blocks.
    summed: tuple[int, ...] = ()

    def target(self, source: Decomposition) -> Decomposition:
        """Blocks that the ranks get."""
        return Decomposition.balanced(self.P_y, source.shape)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Movement to the other blocks; elements of several ranks are summed."""
        source, dtype = source_of(self.P_x, facts, self.summed)
        return redistribution(self.site, source, self.target(source), dtype)

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Balanced, and whole along summed dimensions."""
        return Decomposition.balanced(P_x, shape, self.summed)


class LayerAlongAxes(MovementLayer[StagedMove]):
    """A movement among ranks of P_x that differ only in the grid dimensions ``axes``, which are sorted.

    Subclasses name the argument for ``axes`` as the documents do; each has the other one, ``axes_keep``, too.
    """

    _argument: ClassVar[str]
    _shown = ("axes",)

    def __init__(self, P_x: Partition, axes: Axes, keep: Axes, **options: Unpack[LayerOptions]) -> None:
        self.axes = chosen_axes(type(self).__name__, P_x, self._argument, axes, keep)
        super().__init__(P_x, **options)


def chosen_axes(kind: str, P: Partition, what: str, axes: Axes, keep: Axes) -> tuple[int, ...]:
    """Grid dimensions ``axes``, or all except ``keep``; sorted.

    Examples
    --------
    >>> P = Partition(tuple(range(8)), (2, 2, 2), 0)
    >>> chosen_axes("AllGather", P, "axes", -1, None), chosen_axes("AllGather", P, "axes", None, keep=-1)
    ((2,), (0, 1))
    """
    given: Any = axes if keep is None else keep
    if given is None or (axes is not None and keep is not None):
        raise ArgumentError(f"{kind}: give either {what} or axes_keep, got {what}={axes}, axes_keep={keep}")
    try:
        found = normalize_axis_tuple([*given] if isinstance(given, Iterable) else given, P.dim)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{kind}: axes are integers of grid {P.shape}, got {given}: {error}") from None
    return tuple(d for d in range(P.dim) if (d in found) == (keep is None))


class Repartition(_OfBlocks):
    """Move a tensor from one Cartesian partition to another; the result is balanced.

    The result is always new memory. The adjoint moves gradients back to the blocks of the input.

    Parameters
    ----------
    P_x, P_y
        Input and output partition, with as many dimensions as the tensor.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Repartition document; requirement B5.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_rows = P_world.create_cartesian_topology_partition((P_world.size, 1))
    >>> P_columns = P_world.create_cartesian_topology_partition((1, P_world.size))
    >>> rows = shard(P_rows, torch.rand(6, 8)).to_local()
    >>> rows.shape, Repartition(P_rows, P_columns)(rows).shape
    (torch.Size([3, 8]), torch.Size([6, 4]))
    """

    def __init__(
        self, P_x: Partition, P_y: Partition, preserve_batch: bool = True, **options: Unpack[LayerOptions]
    ) -> None:
        check_dims(type(self), (P_y.dim,), P_x=P_x)
        super().__init__(P_x, P_y, preserve_batch, **options)


# Another name of this layer.
DistributedTranspose = Repartition


class AllGather(LayerAlongAxes, _OfBlocks):
    """Gather a tensor along some grid dimensions, on every rank.

    Each rank receives the shards of all ranks that differ from it only in these dimensions. Local output:
    whole along the gathered dimensions. The adjoint sums and scatters, along the cuts of the input. For flat
    vectors without gradients use the collective :class:`distdl_rma.segments.Allgather`.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_all_gather
        Dimensions to gather along, one or several; negative ones count from the end.
    axes_keep
        The dimensions not to gather along, in place of ``axes_all_gather``.

    Notes
    -----
    Requirement B4.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    >>> mine = torch.full((1, 3), float(P_x.rank))
    >>> AllGather(P_x, axes_all_gather=0)(mine)
    tensor([[0., 0., 0.],
            [1., 1., 1.]])
    """

    _argument = "axes_all_gather"

    def __init__(
        self, P_x: Partition, axes_all_gather: Axes = None, axes_keep: Axes = None, **options: Any
    ) -> None:
        super().__init__(P_x, axes_all_gather, axes_keep, **options)

    def target(self, source: Decomposition) -> Decomposition:
        """Blocks that are whole along the gathered dimensions."""
        return lay.whole(source, self.axes)


class ReduceScatter(LayerAlongAxes, _OfBlocks):
    """Sum the tensors of ranks that differ only in some grid dimensions, and cut the sum along these.

    Local input: whole along the scattered dimensions, of equal shape on the ranks that are summed. Local
    output: the balanced share of the sum, which is taken in the order of the partition. The adjoint gathers.
    Arguments are as for :class:`AllGather`.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    >>> ReduceScatter(P_x, axes_reduce_scatter=0)(torch.ones(2, 3))
    tensor([[2., 2., 2.]])
    """

    _argument = "axes_reduce_scatter"

    def __init__(
        self, P_x: Partition, axes_reduce_scatter: Axes = None, axes_keep: Axes = None, **options: Any
    ) -> None:
        super().__init__(P_x, axes_reduce_scatter, axes_keep, **options)
        self.summed = self.axes

    def target(self, source: Decomposition) -> Decomposition:
        """Blocks of the sum, balanced along the scattered dimensions."""
        scattered = Decomposition.balanced(self.P_x, source.shape)
        return scattered.with_splits({d: s for d, s in enumerate(source.splits) if d not in self.axes})


class HaloExchange(MovementLayer[data_movement.HaloExchange]):
    """Extend each rank's shard by a halo: the adjacent elements of other ranks, corners included.

    The global tensor ``(batch, channel, *spatial)`` is padded as torch pads it. Each rank receives its own
    part and ``width`` more elements on either side, in one round, even if shards are smaller than the width.
    A shard that is empty in a spatial dimension has an empty result. The adjoint adds the gradient of each
    copy to the gradient of the copied element.

    Parameters
    ----------
    P_x
        Partition of input and output; grid and tensor have the same dimensions.
    width
        Number of elements before and behind the shard: one number for all spatial dimensions, or for each a
        number or a pair (left, right).
    padding_mode
        Padding beyond the global tensor: ``"zeros"``, ``"constant"`` (``value``), ``"reflect"``,
        ``"replicate"`` or ``"circular"``.
    value
        The constant of ``"constant"``.

    Raises
    ------
    ShapeError
        In a call: also if the global tensor is too small for the padding mode.

    Notes
    -----
    Convolution document, halo exchange; requirement B9.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    >>> mine = torch.tensor([[[1.0, 2.0]]]) + P_x.rank
    >>> HaloExchange(P_x, width=1)(mine)
    tensor([[[0., 1., 2., 2.]]])
    """

    _shown = ("width", "padding_mode", "value")

    def __init__(
        self,
        P_x: Partition,
        width: int | Iterable[int | Iterable[int]],
        padding_mode: str = "zeros",
        value: float = 0.0,
        **options: Unpack[LayerOptions],
    ) -> None:
        kind = type(self).__name__
        if P_x.dim <= LEADING:
            raise PartitionError(f"{kind}: grid {P_x.shape} needs a batch, a channel and spatial dimensions")
        if padding_mode not in PADDING_MODES:
            raise ArgumentError(f"{kind}: padding_mode is one of {PADDING_MODES}, got {padding_mode!r}")
        self.width = _pairs(kind, width, P_x.dim - LEADING)
        self.padding_mode, self.value = padding_mode, value
        super().__init__(P_x, P_x, **options)

    def plan(self, facts: dict[int, InputFacts]) -> data_movement.HaloExchange:
        """Operation that gathers each shard with its halo."""
        source, dtype = source_of(self.P_x, facts)
        mode, value = self.padding_mode, self.value
        return data_movement.HaloExchange(self.site, source, dtype, self.width, mode, value)


def _pairs(kind: str, width: int | Iterable[int | Iterable[int]], dims: int) -> tuple[tuple[int, int], ...]:
    # Left and right of each spatial dimension: of 1 in two dimensions, ((1, 1), (1, 1)); of [1, (0, 2)],
    # ((1, 1), (0, 2)). All that is not of this form has one error, which says the form.
    widths: Any = [*width] if isinstance(width, Iterable) else [width] * dims
    with suppress(TypeError, ValueError):
        pairs = [each if isinstance(each, Iterable) else (each, each) for each in widths]
        found = tuple((as_int(before), as_int(behind)) for before, behind in pairs)
        if len(found) == dims and min(map(min, found)) >= 0:
            return found
    raise ArgumentError(
        f"{kind}: width is a number from 0, or for each of {dims} spatial dimensions a number or a pair, got"
        f" {width}"
    )


class _OfSubtensors(MovementLayer[StagedMove]):
    # A movement of subtensors: tensors of the ranks that need not be blocks of one tensor. If they are, the
    # output is one too, and so has a layout for split tensors.
    # Dimensions of P_x along which subtensors are summed.
    axes: tuple[int, ...] = ()

    def subtensors(self, facts: dict[int, InputFacts]) -> tuple[Subtensors, torch.dtype]:
        """Subtensors as blocks of one tensor, or their shapes by rank if they form none; and their type."""
        P_x, dtype = self.P_x, input_dtype(self.P_x, facts)
        shapes = {rank: facts[rank].shape for rank in P_x.ranks}
        # If only summed dimensions have several ranks, equal shapes are copies in place of blocks.
        one = all(extent == 1 or d in self.axes for d, extent in enumerate(P_x.shape))
        if one and len(set(shapes.values())) == 1:
            return Decomposition.replicated(P_x, shapes[P_x.ranks[0]]), dtype
        try:
            return Decomposition.from_local_shapes(P_x, shapes, self.axes), dtype
        except ShapeError:
            # Subtensors of any shapes are valid.
            return shapes, dtype

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """One subtensor of this shape on each rank."""
        return Decomposition.replicated(P_x, shape)


class _Between(_OfSubtensors):
    # Movement between groups of ranks and one rank for each group. A broadcast is the sum with its ends
    # exchanged, and so takes the same groups from the other side.
    _operation: ClassVar[Callable[..., StagedMove]]
    _shown = ("transpose_src", "transpose_dest")

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        sums = self._operation is sum_reduce
        sides = (P_x, transpose_src), (P_y, transpose_dest)
        (P_many, flip_many), (P_few, flip_few) = sides if sums else sides[::-1]
        with attributed(type(self).__name__, PartitionError):
            first, *_ = groups_onto(P_many, P_few, flip_many, flip_few)
        super().__init__(P_x, P_y, preserve_batch, **options)
        if sums:
            # The dimensions in which ranks of the first group differ from the first rank of P_x.
            self.axes = tuple(sorted({d for r in first for d, i in enumerate(P_x.index_of(r)) if i}))

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Sum-reduction of each group to its rank, or broadcast from the rank to its group."""
        source, dtype = self.subtensors(facts)
        flips = self.transpose_src, self.transpose_dest
        return self._operation(self.site, source, self.P_x, self.P_y, dtype, flips)


class SumReduce(_Between):
    """Sum subtensors from P_x to P_y, along the dimensions in which the grid of P_y is 1.

    The grid of P_y is extended to the left with ones; then each of its dimensions must equal that of P_x, or
    be 1. Subtensors that are summed must be equal in shape; otherwise any shape is valid for any grid. The
    order of summation is that of P_x, so that results are equal from run to run. Short types are summed in
    float32. With several nodes each node sums first. The adjoint is :class:`Broadcast`.

    Parameters
    ----------
    P_x, P_y
        Input and output partition.
    transpose_src, transpose_dest
        Whether the grid of P_x, or P_y, is transposed first: the rank at (i, j) counts as at (j, i).
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Sum-reduce document; requirement B3.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((P_world.size,))
    >>> P_root = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1,))
    >>> SumReduce(P_x, P_root)(torch.ones(3))
    tensor([2., 2., 2.])
    """

    _operation = staticmethod(sum_reduce)


class Broadcast(_Between):
    """Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.

    The grid of P_x is extended to the left with ones; then each of its dimensions must equal that of P_y, or
    be 1. Subtensors may have any shape, for any grid. Each node receives one copy, and distributes it among
    its ranks. The adjoint is :class:`SumReduce`: gradients are summed in the order of P_y.

    Parameters
    ----------
    P_x, P_y, transpose_src, transpose_dest, preserve_batch
        As for :class:`SumReduce`.

    Notes
    -----
    Sum-reduce document, read from its end; requirement B3.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_root = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1,))
    >>> P_y = P_world.create_cartesian_topology_partition((P_world.size,))
    >>> x = torch.ones(3) if P_root.active else zero_volume_tensor()
    >>> Broadcast(P_root, P_y)(x)
    tensor([1., 1., 1.])
    """

    _operation = staticmethod(broadcast)


class AllSumReduce(LayerAlongAxes, _OfSubtensors):
    """Sum the subtensors of ranks that differ only in some grid dimensions; each of them receives the sum.

    Subtensors that are summed must be equal in shape; otherwise any shape is valid for any grid. The result
    is bitwise equal on the ranks that share it, and from run to run. The layer is its own adjoint. Arguments
    are as for :class:`AllGather`.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    >>> AllSumReduce(P_x, axes_reduce=0)(torch.ones(3))
    tensor([2., 2., 2.])
    """

    _argument = "axes_reduce"

    def __init__(
        self, P_x: Partition, axes_reduce: Axes = None, axes_keep: Axes = None, **options: Any
    ) -> None:
        super().__init__(P_x, axes_reduce, axes_keep, **options)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Sum within groups of ranks."""
        source, dtype = self.subtensors(facts)
        return all_sum_reduce(self.site, source, self.P_x, self.axes, dtype)


class DistributedConcat(MovementLayer[Concat]):
    """Concatenation along the channels, dimension 1, of tensors split over ranks in any of their dimensions.

    Local inputs: the shards of this rank. Local output: the balanced shard of the concatenated tensor on P_y;
    if P_y is the partition of the first input, the batch stays cut as in that input. If all partitions are
    equal and cut no channels, it is cut as the first input is, and each rank concatenates its shards.

    Inputs of different types become one type, as in ``torch.cat``. Inputs and gradients travel in their own.

    Parameters
    ----------
    P_xs
        Partition of each input, with as many dimensions as the tensors.
    P_y
        Partition of the output; that of the first input if None.

    Notes
    -----
    Interface document, chapter 5; requirement A20.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> cat = DistributedConcat([P_x, P_x])
    >>> cat(shard(P_x, torch.rand(1, 3, 8, 8)), shard(P_x, torch.rand(1, 5, 8, 8))).shape
    torch.Size([1, 8, 8, 8])
    """

    def __init__(
        self, P_xs: Sequence[Partition], P_y: Partition | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        P_xs = tuple(P_xs)
        if not P_xs:
            raise PartitionError(f"{type(self).__name__}: needs the partition of at least one input")
        P_y = P_xs[0] if P_y is None else P_y
        # The dimensions of the tensors: batch and channels at least.
        dims = (max(P_y.dim, CHANNELS + 1),)
        check_dims(type(self), dims, **{f"P_xs[{at}]": P_x for at, P_x in enumerate(P_xs)}, P_y=P_y)
        super().__init__(P_xs, P_y, **options)

    def plan(self, facts: dict[int, InputFacts]) -> Concat:
        """Movement of each input to its channels of the output."""
        inputs = []
        for at, P_x in enumerate(self.P_xs):
            with attributed(f"input {at}"):
                inputs.append(source_of(P_x, {rank: fact.of(at) for rank, fact in facts.items()}))
        sources, dtypes = zip(*inputs, strict=True)
        return Concat(self.site, sources, dtypes, self.P_y)

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of all inputs."""
        return sum(nbytes_of(x) for x in inputs)

    @reports_failures
    def connect(  # type: ignore[override]
        self, shapes: Sequence[Sequence[int]] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """As in the base, with the global shape of each input; ``dtype`` is torch's default if None."""
        given = [None] * len(self.P_xs) if shapes is None else list(shapes)
        self._check_outside(given)
        # If there are too many shapes, all ranks raise.
        xs = [self.expected(self.partition_of(at, 0), shape, dtype, at) for at, shape in enumerate(given)]
        self.connect_for(xs)

    @reports_failures
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate ``inputs``: the local shards, and tensors without elements outside of a partition."""
        self._check_outside(inputs)
        return self.apply_to(*inputs)

    def _check_outside(self, given: Sequence[object]) -> None:
        # Ranks that take part in calls compare how many inputs each of them has.
        if self.agreement is None and len(given) != len(self.P_xs):
            DistributedLayer.refuse(self, f"takes {len(self.P_xs)} inputs, got {len(given)}")

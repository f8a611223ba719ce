"""Layers from global parameters: global shape, machine, and distribution of the tensors over the machine.

Local inputs and output are the balanced shards of the global tensors, without elements on idle ranks. Calls
with another batch or image size than announced remain possible. ``machine`` is the machine M, or a partition
of its ranks in the order of M, such as ``P_world``. A distribution that does not fit the dimensions or the
machine raises ``PartitionError``, which quotes the inequality; extents out of range raise ``ShapeError``.
Arguments with torch's names are as in torch, all others as in :class:`DistributedLayer`.

The interface document describes layers by what is known before any data: (N, C, F, H, W) and how many ranks
cut each. These functions turn that into partitions, build the same layers as everybody, and *announce* the
tensors, so that callbacks answer with sizes before the first call::

    Conv(machine, (2, 3, 8, 16, 16), Distribution(1, 1, 4, 1), ...)
        P_x  (1, 1, 4, 1) of the ranks of M, by the distribution's order
        conv DistributedConv2d(P_x, 3, 8, ...)
        announce: input 2 x 3 x 16 x 16, output 2 x 8 x 16 x 16, in balanced blocks

They are functions, capital letters by the document's names: what they return are ordinary layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index as as_int
from typing import Any, Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.distribution import INPUT, NORM, OUTPUT, Distribution
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.partitioned import conv, norm
from distdl_rma.layers.partitioned.core.arguments import LayerOptions
from distdl_rma.layers.partitioned.core.refusals import attributed
from distdl_rma.layers.partitioned.data_movement import DistributedConcat
from distdl_rma.segments.machine import Machine

_CONVS = conv.DistributedConv1d, conv.DistributedConv2d, conv.DistributedConv3d
_NORMS = norm.DistributedInstanceNorm1d, norm.DistributedInstanceNorm2d, norm.DistributedInstanceNorm3d
_MOST_SPACE = len(_CONVS)


def Conv(  # noqa: N802
    machine: Machine | Partition,
    extents: Sequence[int],
    input: Distribution,
    output: Distribution | None = None,
    **options: Any,
) -> conv.DistributedConv:
    """Convolution from global parameters; a ``DistributedConv1d``, ``2d`` or ``3d``.

    Parameters
    ----------
    extents
        (N, C, F, H, W), or with one or three spatial extents: batch, input channels, filters, image.
    input, output
        Distribution of the tensors, over C and over F; that of the input if ``output`` is None.
    kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype, name
        By name, as for :class:`DistributedConv2d`; so are callbacks.
    placement, weights
        ``"replicated"``, the only pattern of the interface document: weights are on all ranks of the machine.
        Others raise ``UnsupportedError``.

    Notes
    -----
    Interface document, chapter 3; requirements A3 to A8, A13, A17, A18.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> rows = Distribution(1, 1, machine.size, 1)
    >>> conv = Conv(machine, (2, 3, 8, 16, 16), rows, kernel_size=3, padding=1)
    >>> conv(torch.rand(2, 3, 8, 16)).shape  # this rank's rows
    torch.Size([2, 8, 8, 16])
    """
    who = options.get("name") or "Conv"
    batch, channels, filters, *space = _extents(who, "(N, C, F, H, W)", extents, 3)
    if min(channels, filters) < 1:
        raise ShapeError(f"{who}: needs channels, got {channels} in and {filters} out")
    output = input if output is None else output
    P_x = _partition_for(f"{who}: input", machine, input, INPUT, len(space))
    P_y = _partition_for(f"{who}: output", machine, output, OUTPUT, len(space))
    for key in ("placement", "weights"):
        if options.get(key) not in (None, "replicated"):
            raise UnsupportedError(
                f'{who}: {key}={options[key]!r}: from global parameters weights are "replicated", the only'
                " pattern of the interface document; build the layer from partitions for others"
            )
    layer = _CONVS[len(space) - 1](P_x, channels, filters, P_y=P_y, **options)
    with attributed(who):
        outputs = layer.options.stencil.outputs(tuple(space))
    layer.announce(
        (Decomposition.balanced(P_x, (batch, channels, *space)),),
        Decomposition.balanced(P_y, (batch, filters, *outputs)),
        layer.weight.dtype,
    )
    return layer


def InstanceNorm(  # noqa: N802
    machine: Machine | Partition, extents: Sequence[int], distribution: Distribution, **options: Any
) -> norm.DistributedInstanceNorm:
    """Instance normalisation from global parameters; a ``DistributedInstanceNorm1d``, ``2d`` or ``3d``.

    Weights and running statistics are whole on all ranks of the machine.

    Parameters
    ----------
    extents
        (N, C, H, W), or with one or three spatial extents.
    distribution
        Distribution of input and output.
    eps, momentum, affine, track_running_stats, device, dtype, bias, name
        By name, as for :class:`DistributedInstanceNorm2d`; so are callbacks.

    Notes
    -----
    Interface document, chapter 4; requirements A3 to A8, A13, A19.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> rows = Distribution(1, 1, machine.size, 1)
    >>> norm = InstanceNorm(machine, (2, 3, 16, 16), rows)
    >>> norm(torch.rand(2, 3, 8, 16)).shape  # this rank's rows
    torch.Size([2, 3, 8, 16])
    """
    who = options.get("name") or "InstanceNorm"
    batch, channels, *space = _extents(who, "(N, C, H, W)", extents, LEADING)
    P_x = _partition_for(who, machine, distribution, NORM, len(space))
    layer = _NORMS[len(space) - 1](P_x, channels, placement="replicated", **options)
    blocks = Decomposition.balanced(P_x, (batch, channels, *space))
    layer.announce((blocks,), blocks, options.get("dtype") or torch.get_default_dtype())
    return layer


def Concat(  # noqa: N802
    machine: Machine | Partition,
    extents: Sequence[Any],
    inputs: Sequence[Distribution],
    output: Distribution | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: Unpack[LayerOptions],
) -> DistributedConcat:
    """Concatenation along channels from global parameters; a ``DistributedConcat``.

    Parameters
    ----------
    extents
        (N, (C1, C2, ...), H, W), or with one or three spatial extents: the channels of each input.
    inputs
        Distribution of each input; ``ShapeError`` if their number is not that of the channels.
    output
        Distribution of the output; that of the first input if None.
    dtype
        Announced type of the tensors; torch's default if None.

    Notes
    -----
    Interface document, chapter 5; requirements A3 to A8, A13, A20.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> rows = Distribution(1, 1, machine.size, 1)
    >>> cat = Concat(machine, (2, (3, 5), 16, 16), [rows, rows])
    >>> cat(torch.rand(2, 3, 8, 16), torch.rand(2, 5, 8, 16)).shape  # this rank's rows
    torch.Size([2, 8, 8, 16])
    """
    who, wanted = options.get("name") or "Concat", "(N, (C1, C2, ...), H, W)"
    try:
        batch, channels, *space = extents
        parts = [as_int(count) for count in channels]
    except (TypeError, ValueError):
        raise ShapeError(f"{who}: extents are {wanted}, got {extents!r}") from None
    batch, total, *space = _extents(who, wanted, (batch, sum(parts), *space), LEADING)
    if not isinstance(inputs, Iterable):
        raise PartitionError(f"{who}: inputs are a sequence, a Distribution for each input, got {inputs!r}")
    inputs = tuple(inputs)
    if len(inputs) != len(parts) or not parts or min(parts) < 0:
        raise ShapeError(f"{who}: extents are {wanted}, got {extents!r} for {len(inputs)} distributions")
    numbered = enumerate(inputs)
    P_xs = [_partition_for(f"{who}: input {at}", machine, each, INPUT, len(space)) for at, each in numbered]
    chosen = inputs[0] if output is None else output
    P_y = _partition_for(f"{who}: output", machine, chosen, OUTPUT, len(space))
    layer = DistributedConcat(P_xs, P_y, **options)
    layer.announce(
        [Decomposition.balanced(P_x, (batch, count, *space)) for P_x, count in zip(P_xs, parts, strict=True)],
        Decomposition.balanced(P_y, (batch, total, *space)),
        dtype or torch.get_default_dtype(),
    )
    return layer


def _extents(who: str, wanted: str, extents: Sequence[int], leading: int) -> tuple[int, ...]:
    # The extents as integers: ``leading`` ones, such as N, C and F, then 1 to 3 of the image.
    try:
        found = tuple(as_int(extent) for extent in extents)
    except TypeError:
        raise ShapeError(f"{who}: extents are integers {wanted}, got {extents!r}") from None
    if not leading < len(found) <= leading + _MOST_SPACE or min(found) < 0:
        raise ShapeError(
            f"{who}: extents are {wanted} with 1 to {_MOST_SPACE} spatial ones, none below 0, got {found}"
        )
    return found


def _partition_for(
    who: str, machine: Machine | Partition, distribution: Distribution, equations: Sequence[str], space: int
) -> Partition:
    if not isinstance(distribution, Distribution):
        raise PartitionError(f"{who}: needs a Distribution, got {distribution!r}")
    if distribution.dim != LEADING + space:
        raise PartitionError(
            f"{who}: {distribution} has {distribution.dim} dimensions, the tensor has {LEADING + space}"
        )
    # A partition may be a part of the machine, or in another order: then that order is the document's M.
    world = machine if isinstance(machine, Partition) else Machine.of(machine).partition()
    distribution.check(world.size, equations, who)
    return distribution.on(world)

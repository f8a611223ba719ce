"""Layers from global parameters: global shape, machine, and how the tensors are distributed over it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.distribution import INPUT, NORM, OUTPUT, Distribution
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.conv.conv import (
    DistributedConv,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
)
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.concat import DistributedConcat
from distdl_rma.layers.norm.batch_instance_group import (
    DistributedInstanceNorm,
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
from distdl_rma.machine import Machine

_CONVS: tuple[type[DistributedConv], ...] = (DistributedConv1d, DistributedConv2d, DistributedConv3d)
_NORMS: tuple[type[DistributedInstanceNorm], ...] = (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
_MOST_SPACE = len(_CONVS)


def Conv(  # noqa: N802
    machine: Machine | Partition,
    extents: Sequence[int],
    input: Distribution,
    output: Distribution | None = None,
    *,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "zeros",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    weights: str = "replicated",
    name: str | None = None,
    **callbacks: Unpack[Callbacks],
) -> DistributedConv:
    """Convolution from global parameters; a ``DistributedConv1d``, ``2d`` or ``3d``.

    Local input and output: the balanced shards of the global tensors, without elements on idle ranks.
    Weights are on all ranks of the machine. The global shape is announced, not prescribed: calls with
    another batch or image size remain possible. Collective over the machine.

    Parameters
    ----------
    machine
        M; or a partition of its ranks in the order of M, such as ``P_world``.
    extents
        (N, C, F, H, W), or with one or three spatial extents: batch, input channels, filters, image.
    input, output
        Distribution of the tensors, over C and over F; the output as the input if None.
    kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        As in torch.
    weights
        ``"replicated"``, the only pattern of the interface document.
    name
        For messages.
    callbacks
        See :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If a distribution does not fit the dimensions or the machine; quotes the inequality.
    ShapeError
        If an extent or another argument is out of range.
    UnsupportedError
        If another pattern of weights is asked for.

    Notes
    -----
    Interface document, chapter 3; requirements A3 to A8, A13, A17, A18.
    """
    who = name or "Conv"
    batch, channels, filters, *space = _extents(who, "(N, C, F, H, W)", extents, 3)
    if min(channels, filters) < 1:
        raise ShapeError(f"{who}: needs channels, got {channels} in and {filters} out")
    output = input if output is None else output
    P_x = _place(f"{who}: input", machine, input, INPUT, len(space))
    P_y = _place(f"{who}: output", machine, output, OUTPUT, len(space))
    if weights != "replicated":
        raise UnsupportedError(
            f'{who}: weights={weights!r}: from global parameters weights are "replicated", the only pattern'
            " of the interface document; build the layer from partitions for others"
        )
    arguments: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    arguments |= {"bias": bias, "padding_mode": padding_mode, "device": device, "dtype": dtype}
    layer = _CONVS[len(space) - 1](
        P_x, channels, filters, kernel_size, P_y=P_y, weights=weights, name=name, **arguments, **callbacks
    )
    try:
        outputs = layer.stencil.outputs(tuple(space))
    except ShapeError as error:
        raise ShapeError(f"{who}: {error}") from None
    layer.announce(
        (Decomposition.balanced(P_x, (batch, channels, *space)),),
        Decomposition.balanced(P_y, (batch, filters, *outputs)),
        layer.weight.dtype,
    )
    return layer


def InstanceNorm(  # noqa: N802
    machine: Machine | Partition,
    extents: Sequence[int],
    distribution: Distribution,
    *,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = False,
    track_running_stats: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    bias: bool = True,
    name: str | None = None,
    **callbacks: Unpack[Callbacks],
) -> DistributedInstanceNorm:
    """Instance normalisation from global parameters; a ``DistributedInstanceNorm1d``, ``2d`` or ``3d``.

    Local input and output: the balanced shard of the global tensor, without elements on idle ranks.
    Weights and running statistics are whole on all ranks of the machine. The global shape is announced, not
    prescribed. Collective over
    the machine.

    Parameters
    ----------
    machine
        M; or a partition of its ranks in the order of M, such as ``P_world``.
    extents
        (N, C, H, W), or with one or three spatial extents.
    distribution
        Distribution of input and output.
    eps, momentum, affine, track_running_stats, device, dtype, bias
        As in torch.
    name
        For messages.
    callbacks
        See :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If the distribution does not fit the dimensions or the machine; quotes the inequality.
    ShapeError
        If an extent is out of range.

    Notes
    -----
    Interface document, chapter 4; requirements A3 to A8, A13, A19.
    """
    who = name or "InstanceNorm"
    batch, channels, *space = _extents(who, "(N, C, H, W)", extents, LEADING)
    P_x = _place(who, machine, distribution, NORM, len(space))
    layer = _NORMS[len(space) - 1](
        P_x,
        channels,
        eps,
        momentum,
        affine,
        track_running_stats,
        device,
        dtype,
        bias=bias,
        weights="replicated",
        name=name,
        **callbacks,
    )
    blocks = Decomposition.balanced(P_x, (batch, channels, *space))
    layer.announce((blocks,), blocks, dtype or torch.get_default_dtype())
    return layer


def Concat(  # noqa: N802
    machine: Machine | Partition,
    extents: Sequence[Any],
    inputs: Sequence[Distribution],
    output: Distribution | None = None,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    **callbacks: Unpack[Callbacks],
) -> DistributedConcat:
    """Concatenation along channels from global parameters; a ``DistributedConcat``.

    Local inputs and output: the balanced shards of the global tensors, without elements on idle ranks. The
    global shapes are announced, not prescribed. Collective over the machine.

    Parameters
    ----------
    machine
        M; or a partition of its ranks in the order of M, such as ``P_world``.
    extents
        (N, (C1, C2, ...), H, W), or with one or three spatial extents: the channels of each input.
    inputs
        Distribution of each input.
    output
        Distribution of the output; that of the first input if None.
    dtype
        Type of the tensors that is announced; torch's default if None.
    name
        For messages.
    callbacks
        See :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If a distribution does not fit the dimensions or the machine; quotes the inequality.
    ShapeError
        If an extent is out of range, or there are not as many distributions as inputs.

    Notes
    -----
    Interface document, chapter 5; requirements A3 to A8, A13, A20.
    """
    who, wanted = name or "Concat", "(N, (C1, C2, ...), H, W)"
    try:
        batch, channels, *space = extents
        parts = [as_int(count) for count in channels]
    except (TypeError, ValueError):
        raise ShapeError(f"{who}: extents are {wanted}, got {extents!r}") from None
    batch, total, *space = _extents(who, wanted, (batch, sum(parts), *space), LEADING)
    try:
        inputs = tuple(inputs)
    except TypeError:
        raise PartitionError(
            f"{who}: inputs are a sequence, a Distribution for each input, got {inputs!r}"
        ) from None
    if len(inputs) != len(parts) or not parts or min(parts) < 0:
        raise ShapeError(f"{who}: extents are {wanted}, got {extents!r} for {len(inputs)} distributions")
    P_xs = [
        _place(f"{who}: input {at}", machine, distribution, INPUT, len(space))
        for at, distribution in enumerate(inputs)
    ]
    chosen = inputs[0] if output is None else output
    P_y = _place(f"{who}: output", machine, chosen, OUTPUT, len(space))
    layer = DistributedConcat(P_xs, P_y, name=name, **callbacks)
    layer.announce(
        [Decomposition.balanced(P_x, (batch, count, *space)) for P_x, count in zip(P_xs, parts, strict=True)],
        Decomposition.balanced(P_y, (batch, total, *space)),
        dtype or torch.get_default_dtype(),
    )
    return layer


def _extents(who: str, wanted: str, extents: Sequence[int], leading: int) -> tuple[int, ...]:
    try:
        found = tuple(as_int(extent) for extent in extents)
    except TypeError:
        raise ShapeError(f"{who}: extents are integers {wanted}, got {extents!r}") from None
    if not leading < len(found) <= leading + _MOST_SPACE or min(found) < 0:
        raise ShapeError(
            f"{who}: extents are {wanted} with 1 to {_MOST_SPACE} spatial ones, none below 0, got {found}"
        )
    return found


def _place(
    who: str,
    machine: Machine | Partition,
    distribution: Distribution,
    equations: Sequence[str],
    space: int,
) -> Partition:
    if not isinstance(distribution, Distribution):
        raise PartitionError(f"{who}: needs a Distribution, got {distribution!r}")
    if distribution.dim != LEADING + space:
        raise PartitionError(
            f"{who}: {distribution} has {distribution.dim} dimensions, the tensor has {LEADING + space}"
        )
    world = machine if isinstance(machine, Partition) else Machine.of(machine).partition()
    distribution.check(world.size, equations, who)
    return distribution.on(world)

"""Every rank's shard with its neighbours' elements around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from distdl_rma.errors import ArgumentError, PartitionError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.arguments import per_dim
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.base import MovementLayer
from distdl_rma.ops.moves import halo_exchange
from distdl_rma.ops.window_gather import MODES

_SIDES = 2


class HaloExchange(MovementLayer[halo_exchange.HaloExchange]):
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

    def plan(self, facts: dict[int, InputFacts]) -> halo_exchange.HaloExchange:
        """What windows as wide as both halos read, where every element has a window of its own."""
        source, dtype = source_of(self.P_x, facts)
        mode, value = self.padding_mode, self.value
        return halo_exchange.HaloExchange(self.site, source, dtype, self.width, mode, value)


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

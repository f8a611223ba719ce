"""How one rank's convolution falls apart into local data and remote strips."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.exchange import Piece
from distdl_rma.geometry.stencil import Stencil

Slices = tuple[slice, ...]
# Batch and channels come before the spatial dimensions and are never cut here.
_LEADING = (slice(None), slice(None))


@dataclass(frozen=True)
class Patch:
    """A block of input data and the outputs that it adds to; all boxes are spatial.

    A convolution is linear: the sum over disjoint blocks of data is the whole convolution.

    Parameters
    ----------
    data
        Inputs that are given.
    outputs
        Outputs that read any of them.
    taps
        Per dimension the taps of the kernel by which they do.
    region
        Inputs that these outputs read through these taps; zero where no data is.
    """

    data: Box
    outputs: Box
    taps: tuple[tuple[int, int], ...]
    region: Box

    @classmethod
    def of(cls, stencil: Stencil, data: Box, within: Box) -> Patch | None:
        """Patch of a block of data and those outputs that lie ``within`` a box; None if there are none."""
        if data.empty or within.empty:
            return None
        outputs = stencil.readers(data) & within
        if outputs.empty:
            return None
        taps, region = [], []
        for window, d, o in zip(stencil.windows, data.bounds, outputs.bounds, strict=True):
            low, high = window.taps(*d, *o)
            taps.append((low, high))
            origin = -window.left
            region.append(
                (
                    o[0] * window.stride + origin + low * window.dilation,
                    max(
                        o[0] * window.stride + origin + low * window.dilation,
                        (o[1] - 1) * window.stride + origin + (high - 1) * window.dilation + 1,
                    ),
                )
            )
        if any(low == high for low, high in taps):
            return None
        return cls(data, outputs, tuple(taps), Box(tuple(region)))

    @cached_property
    def weight(self) -> Slices:
        """Slices of the weight tensor (out, in, *kernel)."""
        return (*_LEADING, *(slice(low, high) for low, high in self.taps))

    def place(self, within: Box) -> Slices:
        """Slices of the outputs in a local tensor (batch, channel, *spatial) that holds ``within``."""
        return (*_LEADING, *self.outputs.slices(within))

    def crop(self, data: Box) -> Slices:
        """Slices of the part of a block of data that lies in the region."""
        return self._own_crop if data is self.data else (*_LEADING, *(data & self.region).slices(data))

    @cached_property
    def _own_crop(self) -> Slices:
        return (*_LEADING, *(self.data & self.region).slices(self.data))

    @cached_property
    def margins(self) -> tuple[tuple[int, int], ...]:
        """Per dimension the zeros before and behind the data in the region."""
        inside = self.data & self.region
        return tuple(
            (i[0] - r[0], r[1] - i[1]) for i, r in zip(inside.bounds, self.region.bounds, strict=True)
        )

    def native_padding(self, stencil: Stencil) -> tuple[int, ...] | None:
        """Symmetric padding that gives exactly these outputs, or None if only explicit zeros do."""
        if stencil not in self._native:
            self._native[stencil] = self._native_padding(stencil)
        return self._native[stencil]

    @cached_property
    def _native(self) -> dict[Stencil, tuple[int, ...] | None]:
        return {}

    def _native_padding(self, stencil: Stencil) -> tuple[int, ...] | None:
        padding = []
        inside = self.data & self.region
        for window, (low, high), n, (before, _), outputs in zip(
            stencil.windows, self.taps, inside.shape, self.margins, self.outputs.shape, strict=True
        ):
            span = window.dilation * (high - low - 1) + 1
            if (n + 2 * before - span) // window.stride + 1 != outputs:
                return None
            padding.append(before)
        return tuple(padding)


@dataclass(frozen=True)
class OwnAndHalo:
    """The convolution of one rank: a core on its own data, and a strip per side with remote data.

    Parameters
    ----------
    stencil
        The sliding windows.
    domain
        All inputs there are; beyond lies the padding.
    own
        Inputs of this rank.
    outputs
        Outputs of this rank.
    """

    stencil: Stencil
    domain: Box
    own: Box
    outputs: Box

    @cached_property
    def core(self) -> Patch | None:
        """What own data adds."""
        return Patch.of(self.stencil, self.own, self.outputs)

    @cached_property
    def sides(self) -> tuple[Box, ...]:
        """Disjoint boxes that make up all inputs of the domain that are read beyond the own ones.

        The two sides of the first dimension take the corners, those of the next what is left.
        """
        rest = self.stencil.reads(self.outputs) & self.domain
        sides = []
        for d, ((start, stop), (low, high)) in enumerate(zip(rest.bounds, self.own.bounds, strict=True)):
            low, high = min(max(low, start), stop), min(max(high, start), stop)
            sides += [rest.replace(d, start, low), rest.replace(d, high, stop)]
            rest = rest.replace(d, low, high)
        return tuple(side for side in sides if not side.empty)

    @cached_property
    def strips(self) -> tuple[Patch, ...]:
        """What remote data adds, one patch per side that any output reads."""
        patches = (Patch.of(self.stencil, side, self.outputs) for side in self.sides)
        return tuple(patch for patch in patches if patch is not None)

    def landing(self, piece: Piece) -> list[tuple[int, Slices, Slices]]:
        """Where a received piece goes: strip number, slices in its region, slices in the piece."""
        spatial = Box(piece.box.bounds[2:])
        found = []
        for number, strip in enumerate(self.strips):
            common = spatial & strip.data & strip.region
            if not common.empty:
                found.append(
                    (
                        number,
                        (*_LEADING, *common.slices(strip.region)),
                        (*_LEADING, *common.slices(spatial)),
                    )
                )
        return found

"""The U-Net of the sharpening demo, and how its tensors are distributed over the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import torch
from torch import nn

from distdl_rma import Distribution, Machine
from distdl_rma.layers import Concat, Conv, DistributedUpsample, InstanceNorm

COLOURS = 3


# ------------------------------------------------------------------------------------- where the tensors live


@dataclass(frozen=True)
class Level:
    """Tensors of one resolution: the extents of their images, and how all of them are distributed."""

    height: int
    width: int
    distribution: Distribution

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


def levels(size: tuple[int, int], distributions: Sequence[Distribution]) -> list[Level]:
    """Levels from the finest to the coarsest; each has half the resolution of the one before."""
    height, width = size
    found = []
    for distribution in distributions:
        found.append(Level(height, width, distribution))
        height, width = (height + 1) // 2, (width + 1) // 2
    return found


def layouts(ranks: int) -> dict[str, tuple[Distribution, Distribution, Distribution]]:
    """Ways to distribute full, half and quarter resolution over a number of ranks, by name.

    The photographs are always split in rows, as they may come from files. How deeper tensors are split
    is up to the layers, since a convolution and a concatenation may have another distribution for their
    output than for their input.
    """
    rows, columns = Distribution(1, 1, ranks, 1), Distribution(1, 1, 1, ranks)
    across = next(n for n in range(isqrt(ranks), 0, -1) if ranks % n == 0)
    blocks = Distribution(1, 1, ranks // across, across)
    # Every other rank holds channels, the ranks between them are idle.
    parts = (ranks + 1) // 2
    channels = Distribution(1, parts, 1, 1, strides=(1, parts, ranks // parts))
    # One photograph for each half of the ranks, at last for the first rank of each half.
    samples, half = min(2, ranks), max(1, ranks // 2)
    apart = Distribution(samples, 1, half, 1)
    alone = Distribution(samples, 1, 1, 1, strides=(samples, 1, half))
    return {
        "rows": (rows, rows, rows),
        "columns": (rows, columns, blocks),
        "channels": (rows, blocks, channels),
        "samples": (rows, apart, alone),
    }


# --------------------------------------------------------------------------- layers, on many ranks and on one


class Layers(Protocol):
    """Makes the layers of a network; the global extents are those of the input."""

    def conv(self, source: Level, target: Level, channels: int, filters: int, *, bias: bool) -> nn.Module:
        """3 x 3 convolution, with stride 2 to a coarser level."""

    def norm(self, level: Level, channels: int) -> nn.Module:
        """Instance norm."""

    def upsample(self, source: Level, target: Level, channels: int, output: Distribution) -> nn.Module:
        """Interpolation to a finer level, with any distribution for the output."""

    def concat(self, level: Level, channels: Sequence[int], inputs: Sequence[Distribution]) -> nn.Module:
        """Concatenation of tensors of one resolution, to where those of the level are."""


@dataclass(frozen=True)
class Distributed:
    """Layers for a machine, from the global parameters that the interface document asks for."""

    machine: Machine
    batch: int

    def conv(self, source: Level, target: Level, channels: int, filters: int, *, bias: bool) -> nn.Module:
        extents = (self.batch, channels, filters, *source.size)
        return Conv(
            self.machine,
            extents,
            source.distribution,
            target.distribution,
            kernel_size=3,
            stride=stride(source, target),
            padding=1,
            bias=bias,
        )

    def norm(self, level: Level, channels: int) -> nn.Module:
        return InstanceNorm(
            self.machine, (self.batch, channels, *level.size), level.distribution, affine=True
        )

    def upsample(self, source: Level, target: Level, channels: int, output: Distribution) -> nn.Module:
        P_x, P_y = (self.machine.distribute(each) for each in (source.distribution, output))
        return DistributedUpsample(P_x, target.size, mode="bilinear", P_y=P_y)

    def concat(self, level: Level, channels: Sequence[int], inputs: Sequence[Distribution]) -> nn.Module:
        extents = (self.batch, channels, *level.size)
        return Concat(self.machine, extents, inputs, level.distribution)


class Sequential:
    """The same layers from torch, for whole tensors."""

    def conv(self, source: Level, target: Level, channels: int, filters: int, *, bias: bool) -> nn.Module:
        return nn.Conv2d(channels, filters, 3, stride(source, target), 1, bias=bias)

    def norm(self, level: Level, channels: int) -> nn.Module:
        return nn.InstanceNorm2d(channels, affine=True)

    def upsample(self, source: Level, target: Level, channels: int, output: Distribution) -> nn.Module:
        return nn.Upsample(target.size, mode="bilinear")

    def concat(self, level: Level, channels: Sequence[int], inputs: Sequence[Distribution]) -> nn.Module:
        return WholeConcat()


class WholeConcat(nn.Module):
    """``torch.cat`` of channels as a layer."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(inputs, 1)


def stride(source: Level, target: Level) -> int:
    """1, or 2 to a coarser level."""
    return 1 if source.size == target.size else 2


# ------------------------------------------------------------------------------------------------ the network


class UNet(nn.Module):
    """Two steps down, two steps up, and at each resolution a bridge from the way down to the way up.

    Parameters
    ----------
    layers
        Makes the layers: ``Distributed`` or ``Sequential``. The same seed gives the same initial weights.
    places
        Levels of full, half and quarter resolution.
    width
        Channels at full resolution.
    """

    def __init__(self, layers: Layers, places: Sequence[Level], width: int) -> None:
        super().__init__()
        fine, middle, coarse = places
        # Without norms at full resolution: brightness and contrast are to stay.
        self.down_full = nn.Sequential(
            layers.conv(fine, fine, COLOURS, width, bias=True),
            nn.ELU(inplace=True),
            layers.conv(fine, fine, width, width, bias=True),
            nn.ELU(inplace=True),
        )
        self.down_half = nn.Sequential(
            block(layers, fine, middle, width, 2 * width), block(layers, middle, middle, 2 * width, 2 * width)
        )
        self.down_quarter = nn.Sequential(
            block(layers, middle, coarse, 2 * width, 4 * width),
            block(layers, coarse, coarse, 4 * width, 4 * width),
            block(layers, coarse, coarse, 4 * width, 4 * width),
        )
        # The bridge brings together what is distributed differently.
        self.grow_half = layers.upsample(coarse, middle, 4 * width, coarse.distribution)
        self.bridge_half = layers.concat(
            middle, (4 * width, 2 * width), (coarse.distribution, middle.distribution)
        )
        self.up_half = nn.Sequential(
            block(layers, middle, middle, 6 * width, 2 * width),
            block(layers, middle, middle, 2 * width, 2 * width),
        )
        # Here it is the interpolation: its input is a quarter of its output, and so there is less to move.
        self.grow_full = layers.upsample(middle, fine, 2 * width, fine.distribution)
        self.bridge_full = layers.concat(fine, (2 * width, width), (fine.distribution, fine.distribution))
        self.up_full = nn.Sequential(
            layers.conv(fine, fine, 3 * width, width, bias=True),
            nn.ELU(inplace=True),
            layers.conv(fine, fine, width, COLOURS, bias=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = self.down_full(x)
        half = self.down_half(full)
        y = self.grow_half(self.down_quarter(half))
        y = self.up_half(self.bridge_half(y, half))
        y = self.bridge_full(self.grow_full(y), full)
        sharper: torch.Tensor = self.up_full(y)
        return sharper


def block(layers: Layers, source: Level, target: Level, channels: int, filters: int) -> nn.Module:
    """Convolution, norm and activation, to a level that may be coarser."""
    # ELU, not ReLU, whose kink turns rounding into jumps of gradients. No bias before a norm.
    return nn.Sequential(
        layers.conv(source, target, channels, filters, bias=False),
        layers.norm(target, filters),
        nn.ELU(inplace=True),
    )

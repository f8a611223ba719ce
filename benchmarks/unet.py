"""A U-Net as its users write it, of layers from anywhere: torch's, or split ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

CLASSES = 2


class Layers(NamedTuple):
    """What a network is made of; torch's classes, or others that are called like them."""

    conv: Callable[..., nn.Module] = nn.Conv2d
    norm: Callable[..., nn.Module] = nn.BatchNorm2d
    pool: Callable[..., nn.Module] = nn.MaxPool2d
    grow: Callable[..., nn.Module] = nn.ConvTranspose2d
    join: Callable[..., Any] = lambda: lambda *inputs: torch.cat(inputs, 1)


class UNet(nn.Module):
    """Two convolutions, each with batch norm and ReLU, at each of some resolutions, down and up again."""

    def __init__(self, width: int, layers: Layers | None = None, depth: int = 3) -> None:
        super().__init__()
        layers = Layers() if layers is None else layers
        torch.manual_seed(1)
        widths = [width << level for level in range(depth + 1)]
        self.first = _double(layers, 1, width)
        self.pools = nn.ModuleList(layers.pool(2) for _ in range(depth))
        self.down = nn.ModuleList(_double(layers, a, b) for a, b in pairwise(widths))
        self.grow = nn.ModuleList(layers.grow(2 * n, n, 2, stride=2) for n in widths[-2::-1])
        self.join = [layers.join() for _ in range(depth)]
        self.up = nn.ModuleList(_double(layers, 2 * n, n) for n in widths[-2::-1])
        self.last = layers.conv(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes of every pixel."""
        skips = [self.first(x)]
        for pool, down in zip(self.pools, self.down, strict=True):
            skips.append(down(pool(skips[-1])))
        y = skips.pop()
        for grow, join, up in zip(self.grow, self.join, self.up, strict=True):
            y = up(join(skips.pop(), grow(y)))
        scores: torch.Tensor = self.last(y)
        return scores


def _double(layers: Layers, inside: int, outside: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for channels in (inside, outside):
        made += [layers.conv(channels, outside, 3, padding=1, bias=False), layers.norm(outside)]
        made.append(nn.ReLU(inplace=True))
    return nn.Sequential(*made)


def image(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and what the network is to say of it; alike on all ranks."""
    torch.manual_seed(2)
    return torch.randn(1, 1, side, side), torch.randn(1, CLASSES, side, side)

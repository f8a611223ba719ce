"""Networks as their papers have them, small, and as a user would write them: nothing in them knows of
ranks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def _double(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net; skip connections are padded by differences of sizes."""

    def __init__(self, inside=1, classes=2, width=4, depth=2, bilinear=False):
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.first = _double(inside, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in pairwise(widths))
        if bilinear:
            self.up = nn.ModuleList(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True) for _ in widths[1:]
            )
            self.fuse = nn.ModuleList(_double(3 * n, n) for n in widths[-2::-1])
        else:
            self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in widths[-2::-1])
            self.fuse = nn.ModuleList(_double(2 * n, n) for n in widths[-2::-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for up, fuse in zip(self.up, self.fuse, strict=True):
            y, skip = up(y), skips.pop()
            high, wide = skip.size(2) - y.size(2), skip.size(3) - y.size(3)
            y = F.pad(y, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
            y = fuse(torch.cat([skip, y], dim=1))
        return self.last(y)


class _Spectral(nn.Module):
    def __init__(self, width, modes, einsum):
        super().__init__()
        self.modes, self.einsum = modes, einsum
        kind = torch.get_default_dtype().to_complex()
        self.low = nn.Parameter(torch.randn(width, width, modes, modes, dtype=kind) / width)
        self.high = nn.Parameter(torch.randn(width, width, modes, modes, dtype=kind) / width)

    def forward(self, x):
        n, c, h, w = x.shape
        found = torch.fft.rfft2(x)
        m = self.modes
        first = self.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        last = self.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        between = torch.zeros(n, c, h - 2 * m, m, dtype=first.dtype)
        kept = torch.cat([first, between, last], dim=2)
        rest = torch.zeros(n, c, h, w // 2 + 1 - m, dtype=first.dtype)
        return torch.fft.irfft2(torch.cat([kept, rest], dim=3), s=(h, w))


class FNO2d(nn.Module):
    """Fourier neural operator: products with complex parameters between two transforms."""

    def __init__(self, channels=1, width=4, modes=3, layers=2, einsum=torch.einsum):
        super().__init__()
        self.lift = nn.Conv2d(channels, width, 1)
        self.spectral = nn.ModuleList(_Spectral(width, modes, einsum) for _ in range(layers))
        self.plain = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.drop = nn.Conv2d(width, channels, 1)

    def forward(self, x):
        x = self.lift(x)
        for spectral, plain in zip(self.spectral, self.plain, strict=True):
            x = F.gelu(spectral(x) + plain(x))
        return self.drop(x)

"""Networks as their papers have them, small, and as a user would write them: nothing in them knows of
ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def of_dims(name, dims):
    """A class of ``torch.nn`` for so many dimensions."""
    return getattr(nn, f"{name}{dims}d")


def norm_of(kind, dims, channels):
    if kind == "instance":
        return of_dims("InstanceNorm", dims)(channels, affine=True)
    if kind == "group":
        return nn.GroupNorm(2, channels)
    if kind == "batch":
        norm = of_dims("BatchNorm", dims)(channels)
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        return norm
    return nn.Identity()


class UNet(nn.Module):
    """Two levels, skips, transposed convolutions or bilinear resizing; any extents."""

    def __init__(self, dims=2, norm="batch", channels=4, classes=3, bilinear=False):
        super().__init__()
        conv = of_dims("Conv", dims)

        def block(i, o):
            parts = []
            for c in (i, o):
                parts += [conv(c, o, 3, padding=1), norm_of(norm, dims, o), nn.LeakyReLU(0.1)]
            return nn.Sequential(*parts)

        c = channels
        self.down, self.middle, self.bottom = block(1, c), block(c, 2 * c), block(2 * c, 4 * c)
        self.pool = of_dims("MaxPool", dims)(2)
        if bilinear:
            mode = ("linear", "bilinear", "trilinear")[dims - 1]
            up = partial(nn.Upsample, scale_factor=2, mode=mode, align_corners=True)
            self.up_middle, self.up, deep = up(), up(), (6 * c, 3 * c)
        else:
            up = of_dims("ConvTranspose", dims)
            self.up_middle, self.up, deep = up(4 * c, 2 * c, 2, 2), up(2 * c, c, 2, 2), (4 * c, 2 * c)
        self.from_middle, self.from_up = block(deep[0], 2 * c), block(deep[1], c)
        self.last = conv(c, classes, 1)

    def forward(self, x):
        fine = self.down(x)
        middle = self.middle(self.pool(fine))
        bottom = self.bottom(self.pool(middle))
        middle = self.from_middle(torch.cat([middle, self._to(self.up_middle(bottom), middle)], 1))
        return self.last(self.from_up(torch.cat([fine, self._to(self.up(middle), fine)], 1)))

    @staticmethod
    def _to(x, like):
        missing = [n - m for n, m in zip(like.shape[2:], x.shape[2:], strict=True)]
        sides = [n for each in reversed(missing) for n in (0, each)]
        return nn.functional.pad(x, sides, mode="replicate") if any(sides) else x


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

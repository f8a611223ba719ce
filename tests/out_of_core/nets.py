"""Models of the tests of prediction, and a program that predicts and may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Source, plan_prediction, predict

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def norm_of(kind, dims, channels):
    if kind == "instance":
        return _INSTANCE[dims](channels, affine=True)
    if kind == "group":
        return nn.GroupNorm(2, channels)
    if kind == "batch":
        norm = _BATCH[dims](channels)
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        return norm
    return nn.Identity()


class UNet(nn.Module):
    """Two levels, skips, transposed convolutions; any extents."""

    def __init__(self, dims=2, norm="none", channels=4, classes=3):
        super().__init__()
        conv = _CONV[dims]

        def block(i, o):
            parts = []
            for c in (i, o):
                parts += [conv(c, o, 3, padding=1), norm_of(norm, dims, o), nn.LeakyReLU(0.1)]
            return nn.Sequential(*parts)

        c = channels
        self.down, self.middle, self.bottom = block(1, c), block(c, 2 * c), block(2 * c, 4 * c)
        self.pool = _POOL[dims](2)
        self.up_middle, self.up = _UP[dims](4 * c, 2 * c, 2, 2), _UP[dims](2 * c, c, 2, 2)
        self.from_middle, self.from_up = block(4 * c, 2 * c), block(2 * c, c)
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


class Calls(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function, channels=4):
        super().__init__()
        self.conv, self.function = nn.Conv2d(1, channels, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


class Attention(nn.Module):
    """Attention over all patches of an image."""

    def __init__(self, channels=8, heads=2, patch=4, weights=True):
        super().__init__()
        self.cut = nn.Conv2d(1, channels, patch, patch)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.weights = weights

    def forward(self, x):
        y = self.cut(x)
        tokens = y.flatten(2).transpose(1, 2)
        found, _ = self.attention(tokens, tokens, tokens, need_weights=self.weights)
        return found.transpose(1, 2).unflatten(2, y.shape[2:])


class Gated(nn.Module):
    """Squeeze and excitation between two convolutions."""

    def __init__(self, channels=16):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, 2, 3, padding=1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Sigmoid())

    def forward(self, x):
        y = self.first(x)
        return self.last(y * self.gate(y))


# Models whose predictions are measured.
MEASURED = {
    "u-net": UNet,
    "gated": Gated,
    "attention": lambda: Attention(32, 4, 8, weights=False),
    "cumsum": lambda: Calls(lambda x: x.cumsum(2)),
    "flip": lambda: Calls(lambda x: x.flip(2)),
    "roll": lambda: Calls(lambda x: x.roll(700, 2)),
    "unfold": lambda: Calls(lambda x: F.unfold(x, 3, padding=1).mean(1, keepdim=True)),
    "fft": lambda: Calls(lambda x: torch.fft.fft2(x).abs()),
    "channels": lambda: Calls(lambda x: x, 64),
}


def whole(model, x):
    """What the model makes of the whole at once."""
    training = model.training
    with torch.no_grad():
        y = model.eval()(x)
    model.train(training)
    return y


def resident(key):
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _measured(arguments):
    # The growth of this process during a prediction, and the plan's figures.
    torch.manual_seed(0)
    model = MEASURED[arguments["model"]](**arguments["net"])
    extents = arguments["extents"]
    post = (lambda y: y.argmax(1).to(torch.uint8)) if arguments["model"] == "u-net" else None

    def read(box):
        first, *rest = (each.stop - each.start for each in box)
        return torch.arange(box[0].start, box[0].stop).view(-1, *[1] * len(rest)).expand(first, *rest).sin()

    source = Source(tuple(extents), torch.float32, read)
    options = {"memory": arguments["memory"], "scratch": arguments["scratch"], "post": post}
    plan = plan_prediction(model, source, **options)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    predict(model, source, arguments["out"], **options)
    print(
        json.dumps(
            {
                "grown": resident("VmHWM") - before,
                "planned": plan.nbytes,
                "whole": plan.whole_nbytes,
                "passes": plan.passes,
                "disk": plan.disk_nbytes,
                "slabs": plan.slabs,
            }
        )
    )


def _killed(arguments):
    # Ends this process by a signal when so many slabs have been read.
    torch.manual_seed(0)
    model, x = UNet(**arguments["net"]), torch.load(arguments["source"])
    reads = []

    def read(box):
        reads.append(box)
        if len(reads) == arguments["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return x[box]

    predict(model, Source(tuple(x.shape), x.dtype, read), arguments["out"], grid=arguments["grid"])
    print(json.dumps({"reads": len(reads)}))


if __name__ == "__main__":
    {"measured": _measured, "killed": _killed}[sys.argv[1]](json.loads(sys.argv[2]))

"""Models of the tests of prediction, and programs in processes of their own."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.memory import peak_kib
from distdl_rma import Source, plan_prediction, predict
from tests.layers.model.nets import UNet
from tests.run_mpi import completed


class Calls(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function, channels=4):
        super().__init__()
        self.conv, self.function = nn.Conv2d(1, channels, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


class Attention(nn.Module):
    """Attention over all patches of an image."""

    def __init__(self, channels, heads, patch):
        super().__init__()
        self.cut = nn.Conv2d(1, channels, patch, patch)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)

    def forward(self, x):
        y = self.cut(x)
        tokens = y.flatten(2).transpose(1, 2)
        found, _ = self.attention(tokens, tokens, tokens, need_weights=False)
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
    "attention": lambda: Attention(32, 4, 8),
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


def seeded(make):
    """What a function makes of one seed."""
    torch.manual_seed(0)
    return make()


def said(script, *arguments, status=0):
    """What a process of its own prints, which ends with a status."""
    done = completed([sys.executable, "-c", script, *map(str, arguments)])
    assert done.returncode == status, done.stderr
    return done.stdout


def measured(arguments):
    """The growth of this process during a prediction, and what the plan says."""
    model = seeded(lambda: MEASURED[arguments["model"]](**arguments["net"]))
    extents = arguments["extents"]
    post = (lambda y: y.argmax(1).to(torch.uint8)) if arguments["model"] == "u-net" else None

    def read(box):
        first, *rest = (each.stop - each.start for each in box)
        return torch.arange(box[0].start, box[0].stop).view(-1, *[1] * len(rest)).expand(first, *rest).sin()

    source = Source(tuple(extents), torch.float32, read)
    options = {"memory": arguments["memory"], "scratch": arguments["scratch"], "post": post}
    plan = plan_prediction(model, source, **options)
    grown = peak_kib(lambda: predict(model, source, arguments["out"], **options), steps=1) << 10
    print(json.dumps({"grown": grown, "planned": plan.nbytes}))


if __name__ == "__main__":
    measured(json.loads(sys.argv[1]))

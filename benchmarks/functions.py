"""Functions in a distributed model, forward and backward, against the same function of torch on the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.measure import REPETITIONS, Row, added, compare
from benchmarks.split_layers import steps_of
from distdl_rma import Machine

CHANNELS = 16
# Calls per sample of a small step.
INNER = 10


class Inputs(NamedTuple):
    """What functions are given: a large and a small tensor, and the dimension that is cut."""

    large: str
    large_shape: tuple[int, ...]
    small: str
    small_shape: tuple[int, ...]
    cut: int = 2
    # Of a large step, with so many calls each.
    repetitions: int = REPETITIONS
    calls: int = 2

    def grid(self, size: int) -> tuple[int, ...]:
        """One that cuts the dimension over so many ranks."""
        return tuple(size if d == self.cut else 1 for d in range(len(self.large_shape)))


class Function(NamedTuple):
    """A function as a layer, with the ratio to reach and the microseconds that it may add to a small step."""

    layer: Callable[[], nn.Module]
    ratio: float
    added_us: float | None = None
    # Measured under autocast, too.
    bfloat16: bool = False


class Applied(nn.Module):
    """A function without parameters as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class SqueezeExcite(nn.Module):
    """Channels weighted by what a small network makes of their means."""

    def __init__(self) -> None:
        super().__init__()
        squeeze = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(CHANNELS, CHANNELS // 4, 1), nn.ReLU())
        self.weights = nn.Sequential(*squeeze, nn.Conv2d(CHANNELS // 4, CHANNELS, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = x * self.weights(x)
        return weighted


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for inputs, functions in FUNCTIONS.items():
        for name, function in functions.items():
            yield from rows_of(machine, inputs, name, function)


def rows_of(machine: Machine, inputs: Inputs, name: str, function: Function) -> Iterator[Row]:
    """Ratios of the large steps, by type of the elements, and the time that is added to the small one."""
    shape = inputs.large_shape
    P_x = machine.partition(inputs.grid(machine.size))
    for dtype in (torch.float32, torch.bfloat16) if function.bfloat16 else (torch.float32,):
        yield compare(
            f"function {name}, {inputs.large}" + (", bfloat16" if dtype == torch.bfloat16 else ""),
            *steps_of(P_x, function.layer, shape, dtype),
            against="bare local tile",
            target=function.ratio,
            inner=inputs.calls,
            repetitions=inputs.repetitions,
        )
    if function.added_us is not None:
        ours, bare = steps_of(P_x, function.layer, inputs.small_shape)
        yield added(f"function {name}, {inputs.small}", ours, bare, function.added_us, INNER)


def resized(mode: str, corners: bool | None = None) -> Callable[[], nn.Module]:
    return partial(nn.Upsample, scale_factor=2, mode=mode, align_corners=corners)


def conv(size: int, **options: Any) -> Callable[[], nn.Module]:
    return partial(nn.Conv2d, CHANNELS, CHANNELS, size, **options)


def conv_norm_relu(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(conv(3, padding=1)(), norm(), nn.ReLU())


def applied(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return partial(Applied, function)


group_norm = partial(nn.GroupNorm, 4, CHANNELS)
batch_norm = partial(nn.BatchNorm2d, CHANNELS)

ON_IMAGES = {
    "nearest x 2": Function(resized("nearest"), 1.05, 110.0, bfloat16=True),
    "bilinear x 2": Function(resized("bilinear"), 1.15, 200.0, bfloat16=True),
    "bilinear x 2, corners aligned": Function(resized("bilinear", True), 1.4, 250.0, bfloat16=True),
    "bicubic x 2": Function(resized("bicubic"), 1.2, 200.0, bfloat16=True),
    "group norm, 4 groups": Function(group_norm, 1.4, 220.0, bfloat16=True),
    "batch norm": Function(batch_norm, 1.1, 200.0, bfloat16=True),
    "instance norm": Function(partial(nn.InstanceNorm2d, CHANNELS, affine=True), 1.1, 200.0, bfloat16=True),
    "transposed convolution 2x2, stride 2": Function(
        partial(nn.ConvTranspose2d, CHANNELS, CHANNELS, 2, stride=2), 1.05, 150.0, bfloat16=True
    ),
    "transposed convolution 4x4, stride 2": Function(
        partial(nn.ConvTranspose2d, CHANNELS, CHANNELS, 4, stride=2, padding=1), 1.15, 250.0, bfloat16=True
    ),
    "convolution 3x3": Function(conv(3, padding=1), 1.1, 220.0, bfloat16=True),
    "convolution 3x3, stride 2": Function(conv(3, padding=1, stride=2), 1.15, 220.0, bfloat16=True),
    "convolution 3x3, dilated": Function(conv(3, padding=2, dilation=2), 1.15, 220.0, bfloat16=True),
    "convolution 1x1": Function(conv(1), 1.05, 120.0, bfloat16=True),
    "convolution 7x7": Function(conv(7, padding=3), 1.0, 250.0, bfloat16=True),
    "convolution 3x3, depthwise": Function(conv(3, padding=1, groups=CHANNELS), 1.0, 250.0, bfloat16=True),
    "max pool 2": Function(partial(nn.MaxPool2d, 2), 1.05, 110.0),
    "max pool 3, stride 2": Function(partial(nn.MaxPool2d, 3, stride=2, padding=1), 1.15, 180.0),
    "average pool 2": Function(partial(nn.AvgPool2d, 2), 1.05, 110.0),
    "pad reflect 1": Function(partial(nn.ReflectionPad2d, 1), 1.4, 140.0),
    "relu": Function(nn.ReLU, 1.3, 95.0, bfloat16=True),
    "gelu": Function(nn.GELU, 1.1, 95.0),
    "dropout2d": Function(nn.Dropout2d, 1.4, 95.0),
    "dropout": Function(nn.Dropout, 2.5, 120.0, bfloat16=True),
    "alpha dropout": Function(nn.AlphaDropout, 2.5),
    "normal noise": Function(applied(lambda x: x + torch.randn_like(x)), 2.5, 150.0, bfloat16=True),
    "uniform noise": Function(applied(lambda x: x + torch.rand_like(x)), 2.5),
    "add and cat": Function(applied(lambda x: torch.cat((x, x + x), 1)), 1.2, 110.0),
    "softmax over channels": Function(partial(nn.Softmax, 1), 1.15, 100.0),
    "squeeze and excite": Function(SqueezeExcite, 1.3, 400.0),
    "adaptive average 1": Function(partial(nn.AdaptiveAvgPool2d, 1), 1.3, 150.0),
    "pixel shuffle 2": Function(partial(nn.PixelShuffle, 2), 1.05, 110.0),
    "FFT filter": Function(applied(lambda x: torch.fft.irfft2(0.5 * torch.fft.rfft2(x))), 1.4, 400.0),
    "convolution 3x3, group norm, relu": Function(conv_norm_relu(group_norm), 1.2, 420.0),
    "convolution 3x3, batch norm, relu": Function(conv_norm_relu(batch_norm), 1.15, 400.0),
}
ON_CHANNELS_LAST = {
    "layer norm over channels": Function(partial(nn.LayerNorm, CHANNELS), 1.1, 140.0, bfloat16=True),
    "RMS norm over channels": Function(partial(nn.RMSNorm, CHANNELS), 1.1, 140.0, bfloat16=True),
    "linear over channels": Function(partial(nn.Linear, CHANNELS, CHANNELS), 1.1, 150.0),
}
ON_TOKENS = {
    # The block alone has as many queries, and a part of the keys.
    "attention": Function(applied(lambda x: F.scaled_dot_product_attention(x, x, x)), 2.05, 250.0)
}
# With the ratios of the same functions of images.
ON_VOLUMES = {
    "convolution 3x3x3": Function(partial(nn.Conv3d, CHANNELS, CHANNELS, 3, padding=1), 1.1, bfloat16=True),
    "convolution 1x1x1": Function(partial(nn.Conv3d, CHANNELS, CHANNELS, 1), 1.05, bfloat16=True),
    "transposed convolution 2x2x2, stride 2": Function(
        partial(nn.ConvTranspose3d, CHANNELS, CHANNELS, 2, stride=2), 1.05, bfloat16=True
    ),
    "trilinear x 2": Function(resized("trilinear"), 1.15, bfloat16=True),
    "max pool 2": Function(partial(nn.MaxPool3d, 2), 1.05),
    "group norm, 4 groups": Function(group_norm, 1.4, bfloat16=True),
    "instance norm": Function(partial(nn.InstanceNorm3d, CHANNELS, affine=True), 1.1, bfloat16=True),
}
FUNCTIONS: dict[Inputs, dict[str, Function]] = {
    Inputs("256x256", (1, CHANNELS, 256, 256), "16x16", (1, CHANNELS, 16, 16)): ON_IMAGES,
    Inputs("256x256", (1, 256, 256, CHANNELS), "16x16", (1, 16, 16, CHANNELS), cut=1): ON_CHANNELS_LAST,
    Inputs("256 tokens of 64", (1, CHANNELS, 256, 64), "16 tokens of 16", (1, CHANNELS, 16, 16)): ON_TOKENS,
    Inputs("48x48x48", (1, CHANNELS, 48, 48, 48), "8x8x8", (1, CHANNELS, 8, 8, 8), 2, 15, 1): ON_VOLUMES,
}

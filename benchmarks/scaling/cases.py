"""The networks whose scaling is measured and predicted: a U-Net of images, and one of volumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.training_step import step_of
from benchmarks.unet import CLASSES, Layers, UNet
from distdl_rma import Machine, Partition, distribute, shard
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, convolution

Step = Callable[[], object]
_OF_VOLUMES = Layers(nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Case:
    """A network with batch norm and a mean of squares as its loss, for an image of a ``shape`` in space."""

    name: str
    width: int
    depth: int
    shape: tuple[int, ...]

    @property
    def title(self) -> str:
        """What it is, in words."""
        return f"{self.name}, width {self.width}, {'x'.join(map(str, self.shape))}"

    def network(self) -> nn.Module:
        """The network of torch's own modules, alike on all ranks."""
        return UNet(self.width, _OF_VOLUMES if len(self.shape) == 3 else None, self.depth)

    def image(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """An input of a shape in space, and what the network is to say of it; alike on all ranks."""
        torch.manual_seed(2)
        return torch.randn(1, 1, *shape), torch.randn(1, CLASSES, *shape)

    def plain_step(self, shape: tuple[int, ...] | None = None) -> Step:
        """A training step of the network alone, of its whole image unless a shape is given."""
        return step_of(self.network(), *self.image(shape or self.shape), F.mse_loss)

    def tile_step(self, shape: tuple[int, ...]) -> Step:
        """The same of a tile, convolved by the kernels that ranks choose."""
        network = self.network()
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                module.forward = partial(_convolved, module)  # type: ignore[method-assign]
        return step_of(network, *self.image(shape), F.mse_loss)

    def split_step(self, P_x: Partition, shape: tuple[int, ...] | None = None) -> Step:
        """The same on split tensors; collective over the machine of P_x to make."""
        x, target = (shard(P_x, whole) for whole in self.image(shape or self.shape))
        return step_of(distribute(self.network(), P_x), x, target, F.mse_loss)

    def rows_of(self, machine: Machine) -> Partition:
        """The image cut along its first dimension in space."""
        return machine.partition((1, 1, machine.size, *(1,) * (len(self.shape) - 1)))

    def tile(self, ranks: int) -> tuple[int, ...]:
        """What one of so many ranks has of the image, if it is cut like that."""
        return (self.shape[0] // ranks, *self.shape[1:])


def _convolved(layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    steps = ConvolutionArguments(layer.stride, cast(Any, layer.padding), layer.dilation, groups=layer.groups)
    return convolution(x, layer.weight, layer.bias, steps)


CASES = (Case("U-Net", 8, 3, (512, 512)), Case("3-D U-Net", 8, 2, (48, 48, 48)))

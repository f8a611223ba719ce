"""The networks whose gain is measured: a U-Net of images, and ScaFFold's of volumes.

Nothing here imports MPI: a process that measures the memory of a network alone has nothing of it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.training_step import step_of
from benchmarks.unet import CLASSES, UNet

WIDTH = 8
# Channels of the first level, halvings and kinds of fractals: the defaults of the example.
SCAFFOLD = argparse.Namespace(channels=WIDTH, levels=2, classes=3)


@dataclass(frozen=True)
class Network:
    """A network and one sample of a ``shape`` in space.

    ``title`` names it in rows of the history, ``short`` in the tables of pages. Steps of seconds have few
    ``samples``.
    """

    title: str
    short: str
    shape: tuple[int, ...]
    made: Callable[[], nn.Module]
    target: Callable[[tuple[int, ...]], torch.Tensor]
    criterion: Callable[..., Any]
    samples: int

    @property
    def what(self) -> str:
        """What rows call it."""
        return f"{self.title}, {'x'.join(map(str, self.shape))}"

    @property
    def shown(self) -> str:
        """What pages call it."""
        return f"{self.short}, {' x '.join(map(str, self.shape))}"

    def part(self, ranks: int) -> tuple[int, ...]:
        """What one of so many ranks has of the sample, which is cut along its first dimension in space."""
        return (self.shape[0] // ranks, *self.shape[1:])

    def sample(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """An input of a shape in space, and what the network is to say of it; alike on all ranks."""
        torch.manual_seed(2)
        return torch.randn(1, 1, *shape), self.target(shape)

    def step(self) -> Callable[[], object]:
        """A training step of the network alone, in this process."""
        return step_of(self.made(), *self.sample(self.shape), self.criterion)


def unet(side: int, samples: int) -> Network:
    """Of images: batch norm, halved three times, a mean of squares as its loss."""

    def target(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(1, CLASSES, *shape)

    return Network(
        f"U-Net, width {WIDTH}", "2-D U-Net", (side, side), lambda: UNet(WIDTH), target, F.mse_loss, samples
    )


def scaffold(side: int, samples: int) -> Network:
    """Of volumes: group norm, halved twice, cross entropy; the network of ``examples/scaffold.py``."""

    def made() -> nn.Module:
        network: nn.Module = importlib.import_module("examples.scaffold").network(SCAFFOLD)
        return network

    def target(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(SCAFFOLD.classes + 1, (1, *shape))

    title = f"ScaFFold's 3-D U-Net, group norm, {WIDTH} to {WIDTH << SCAFFOLD.levels} channels"
    return Network(title, "3-D U-Net", (side,) * 3, made, target, F.cross_entropy, samples)


NETWORKS = {
    "unet-128": unet(128, 31),
    "unet-512": unet(512, 15),
    "unet-1024": unet(1024, 15),
    "scaffold-64": scaffold(64, 15),
    "scaffold-96": scaffold(96, 15),
}

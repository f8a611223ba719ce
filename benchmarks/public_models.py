"""Public models of packages: ``python -m benchmarks.public_models`` names the installed ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.training_step import step_of


class PublicModel(NamedTuple):
    """A model of a package, and the shape of its input."""

    title: str
    module: str
    name: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    packages: tuple[str, ...] = ("monai",)

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    @property
    def extents(self) -> str:
        return "x".join(map(str, self.shape[2:]))

    def made(self) -> nn.Module:
        """The model, with the same parameters whenever it is made."""
        torch.manual_seed(1)
        model: nn.Module = getattr(importlib.import_module(self.module), self.name)(**self.arguments)
        return model

    def image(self, parts: int = 1) -> torch.Tensor:
        """An input with so many a part of the rows; alike on all ranks."""
        torch.manual_seed(2)
        batch, channels, rows, *rest = self.shape
        return torch.randn(batch, channels, rows // parts, *rest)


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """A training step of a model, with a loss that suits any output."""
    return step_of(model, x, x, lambda y, _: y.square().mean())


NETS = "monai.networks.nets"
IMAGE, COLOURS, VOLUME = (1, 1, 384, 384), (1, 3, 384, 384), (1, 1, 64, 64, 64)
MODELS: dict[str, PublicModel] = {
    "segresnet-2d": PublicModel(
        "SegResNet, group norm, bilinear", NETS, "SegResNet", {"spatial_dims": 2}, IMAGE
    ),
    "segresnet-3d": PublicModel("SegResNet, group norm, trilinear", NETS, "SegResNet", {}, VOLUME),
    "unet-2d": PublicModel(
        "residual U-Net, instance norm",
        NETS,
        "UNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (8, 16, 32, 64),
            "strides": (2, 2, 2),
            "num_res_units": 2,
        },
        IMAGE,
    ),
    "basicunet-3d": PublicModel(
        "BasicUNet, instance norm, transposed convolutions",
        NETS,
        "BasicUNet",
        {"features": (8, 8, 16, 32, 64, 8)},
        VOLUME,
    ),
    "swinunetr-2d": PublicModel(
        "Swin UNETR, attention in windows",
        NETS,
        "SwinUNETR",
        {"in_channels": 1, "out_channels": 2, "spatial_dims": 2, "feature_size": 12},
        IMAGE,
        ("monai", "einops"),
    ),
    "efficientnet-2d": PublicModel(
        "EfficientNet-B0, squeeze and excitation",
        NETS,
        "EfficientNetBN",
        {"model_name": "efficientnet-b0", "pretrained": False},
        COLOURS,
    ),
}


if __name__ == "__main__":
    print(*(name for name, model in MODELS.items() if not model.missing))

"""Models that nobody rewrote, of papers and packages, trained on split tensors beside the same ones alone."""

import importlib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.layers.model.nets import FNO2d, UNet
from tests.layers.model.public import torchvision_models
from tests.layers.model.training import train_beside
from tests.zoo import zoo

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3, 4)]


@pytest.fixture(autouse=True)
def double_precision():
    """Complex parameters too are of the longer type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Positions(nn.Module):
    """Holds parameters and buffers of the size of the image."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rows = nn.Parameter(torch.randn(1, 2, 11, 7)), nn.Parameter(torch.randn(11, 1))
        self.register_buffer("mask", (torch.rand(11, 7) > 0.3).double())
        self.register_buffer("grid", torch.linspace(0, 1, 11).view(1, 1, -1, 1))
        self.tokens = nn.Parameter(torch.randn(77, 2))
        self.conv, self.mix = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        y = self.conv(x) + self.embedding
        y = y * self.mask + self.rows * self.grid
        y = self.mix(torch.cat([y, self.grid.expand(y.shape[0], 1, -1, y.shape[3])], 1))
        tokens = y.flatten(2).transpose(1, 2) + self.tokens
        return tokens.square().mean((0, 2)) * self.rows.mean()


def few_rows():
    first = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    return nn.Sequential(*first, nn.Conv2d(3, 3, 3, padding=1), *last)


def bilinear():
    return UNet(bilinear=True)


# Model, and the shape of its input: extents that divide badly. With more blocks than rows two rows are left
# in the middle.
NETS = {
    "U-Net": (UNet, (2, 1, 37, 30)),
    "U-Net, bilinear": (bilinear, (1, 1, 30, 37)),
    "U-Net, more blocks than rows": (UNet, (2, 1, 18, 9)),
    "U-Net, bilinear, more blocks than rows": (bilinear, (2, 1, 16, 9)),
    "fewer rows than ranks": (few_rows, (2, 1, 2, 9)),
    "positions": (Positions, (2, 1, 11, 7)),
    "FNO": (FNO2d, (2, 1, 17, 14)),
    "FNO, by opt_einsum": (lambda: FNO2d(einsum=pytest.importorskip("opt_einsum").contract), (2, 1, 17, 14)),
}


@pytest.mark.parametrize("name", NETS)
def test_training_is_that_of_the_model_alone(comm, name):
    made, shape = NETS[name]
    # What goes wrong later than in the third step does so on two ranks.
    size, steps = comm.size, 10 if comm.size == 2 and "rows" not in name else 3
    for grid, count in [("2x2", 3)] if size == 4 else [(f"{size}x1", steps), (f"1x{size}", 3)]:
        torch.manual_seed(5)
        train_beside(made(), grid, torch.randn(shape), lambda y: (y - 0.3).square().mean(), steps=count)


with patch.object(zoo, "LIST", Path(__file__).with_name("public_models.txt")):
    MODELS = {model.name: model for model in zoo.models()}
# Each of the four on one number of ranks and blocks on four: every cut of a model is seen within three days.
GRIDS = {2: ["2x1", {"N": 2}], 3: ["1x3", {"C": 3}], 4: ["2x2"]}


def made(model):
    """A model that drops no elements, which a split one draws otherwise; whole samples are."""
    torchvision_models()
    found = eval(model.expression, {}, zoo._Names(importlib.import_module(model.module)))
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return found


@pytest.mark.in_turn(2, 3, 4)
@pytest.mark.filterwarnings("ignore:monai.networks.blocks.Warp")
@pytest.mark.parametrize("name", MODELS)
def test_training_of_a_public_model_is_that_of_the_model_alone(comm, name):
    model = MODELS[name]
    for grid in GRIDS[comm.size]:
        torch.manual_seed(5)
        train_beside(made(model), grid, model.inputs(), zoo.loss_of, steps=2)

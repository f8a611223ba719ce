"""Models of torchvision and MONAI as they are, trained on split tensors beside the same ones alone."""

import importlib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.model.against_alone import train_beside
from tests.model.public import torchvision_models
from tests.zoo import zoo

with patch.object(zoo, "LIST", Path(__file__).with_name("public_models.txt")):
    MODELS = {model.name: model for model in zoo.models()}
# Each of the four on one number of ranks and blocks on four: every cut of a model is seen within three days.
GRIDS = {2: ["2x1", {"N": 2}], 3: ["1x3", {"C": 3}], 4: ["2x2"]}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(model):
    """A model that drops no elements, which a split one draws otherwise; whole samples are."""
    torchvision_models()
    found = eval(model.expression, {}, zoo._Names(importlib.import_module(model.module)))
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.in_turn(2, 3, 4)
@pytest.mark.filterwarnings("ignore:monai.networks.blocks.Warp")
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_model_alone(comm, name):
    model = MODELS[name]
    for grid in GRIDS[comm.size]:
        torch.manual_seed(5)
        train_beside(made(model), grid, model.inputs(), zoo.loss_of, steps=2)

"""Networks that nobody rewrote, trained on split tensors beside the same ones alone."""

import pytest
import torch

from tests.model.against_alone import train_beside, trained
from tests.model.nets import FNO2d, UNet

# Model, and the shape of its input: extents that divide badly.
MODELS = {
    "U-Net": (UNet, (2, 1, 37, 30)),
    "U-Net, bilinear": (lambda: UNet(bilinear=True), (1, 1, 30, 37)),
    "FNO": (FNO2d, (2, 1, 17, 14)),
    "FNO, by opt_einsum": (lambda: FNO2d(einsum=pytest.importorskip("opt_einsum").contract), (2, 1, 17, 14)),
}


@pytest.fixture(autouse=True)
def double_precision():
    """Complex parameters too are of the longer type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_model_alone(comm, name):
    made, shape = MODELS[name]
    for grid, steps in trained(comm.size):
        torch.manual_seed(5)
        model = made()
        x = torch.randn(shape)
        train_beside(model, grid, x, lambda y: (y - 0.3).square().mean(), steps=steps)

"""A model that nobody rewrote, on split tensors over two hosts, trains as it does alone."""

import os

import pytest
import torch

from tests.model.nets import UNet
from tests.model.training import train_beside
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]


def test_a_unet_trains_as_it_does_alone(comm):
    # The cable lies between rows; of four ranks, each has a neighbour on either host.
    grid = {"H": 2, "W": 2} if comm.size == 4 else {"H": -1}
    torch.manual_seed(5)
    x = torch.randn(2, 1, 21, 18)
    train_beside(UNet(), grid, x, lambda y: (y - 0.3).square().mean(), steps=2)

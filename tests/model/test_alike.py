"""Plain losses that ranks compute of data of their own: told when the next call begins."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import MismatchError, shard

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.first(x)


def head(model, y):
    return model.head(y.mean((0, 1, 2)))


def test_labels_behind_a_full_tensor(model, x, comm):
    y = head(model, model(x).full_tensor())
    F.mse_loss(y, torch.full((3,), float(comm.rank == 1))).backward()
    with pytest.raises(MismatchError, match=r"gradient of '(head\.\w+|full_tensor\(\))' was not alike"):
        model(x)
    for _ in range(2):
        F.mse_loss(head(model, model(x).full_tensor()), torch.ones(3)).backward()


def test_parameters_behind_a_block_without_a_graph(model, x):
    block = shard({"H": -1}, x).to_local()
    head(model, block).sum().backward()
    with pytest.raises(
        MismatchError, match=r"gradient of 'head\.\w+'.*to_local\(\) of a tensor that is in no"
    ):
        model(x)
    head(model, model(x).to_local()).sum().backward()
    model(x)


def test_penalties_are_alike(model, x):
    for _ in range(2):
        (model(x).sum() + model.head.weight.square().sum()).backward()
        sum(p.square().sum() for p in model.parameters()).backward()

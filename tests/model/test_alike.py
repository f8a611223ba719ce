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


LOCAL = {
    "mse": (F.mse_loss, True),
    "l1 and a penalty": (lambda y, t: 0.5 * F.l1_loss(y, t) + (y - t).square().sum() / 192, True),
    "all dimensions": (lambda y, t: (y - t).abs().mean((0, 1, 2, 3)), True),
    "classes": (lambda y, t: F.cross_entropy(y, t[:, 0].long()), True),
    "probabilities": (lambda y, t: F.cross_entropy(y, t.softmax(1)), True),
    "probabilities and weights": (
        lambda y, t: F.cross_entropy(y, t.softmax(1), torch.ones(2), label_smoothing=0.1),
        True,
    ),
    "a sum of probabilities": (lambda y, t: -(t.softmax(1) * F.log_softmax(y, 1)).sum() / 96, False),
    "sum of cross entropies": (lambda y, t: F.cross_entropy(y, t.softmax(1), reduction="sum") / 96, False),
    "sum": (lambda y, t: F.mse_loss(y, t, reduction="sum") / 192, False),
    "one dimension": (lambda y, t: (y - t).square().mean(3).sum() / 24, False),
}


@pytest.mark.parametrize("loss", LOCAL)
def test_a_local_mean_is_warned_of_and_a_local_sum_is_not(model, x, comm, loss):
    loss, is_mean = LOCAL[loss]
    y = model(x)
    mine = shard({"H": -1}, torch.zeros(1, 2, 12, 8)).to_local()
    value = loss(y.to_local(), mine)
    if is_mean and comm.rank == 0:
        with pytest.warns(UserWarning, match="begins at a mean over this rank's part") as found:
            value.backward()
        assert found[0].filename == __file__
    else:
        value.backward()
    # Of what all ranks have, of all of it, and of the split tensor itself.
    y = model(x)
    _ = y.to_local()
    F.mse_loss(model(x).redistribute().to_local(), torch.zeros(1, 2, 12, 8)).backward()
    (F.mse_loss(y.full_tensor(), torch.zeros(1, 2, 12, 8)) + y.to_local().square().sum() / 192).backward()
    F.mse_loss(model(x), torch.zeros(1, 2, 12, 8)).backward()


def test_penalties_are_alike(model, x):
    for _ in range(2):
        (model(x).sum() + model.head.weight.square().sum()).backward()
        sum(p.square().sum() for p in model.parameters()).backward()

"""A model, its loss and loops for tests of training; any model distributed and alone."""

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import distribute
from tests.layers.split.against_whole import whole

SHAPE = (2, 3, 13, 11)
STEPS = 3


class Net(nn.Module):
    """Convolutions, a norm, tied weights, and a parameter that is used on split and replicated tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.head.weight
        self.frozen = nn.Conv2d(4, 4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = F.relu(self.norm(self.stem(x)))
        y = y + self.body(self.body(y)) * self.scale.view(1, -1, 1, 1)
        y = self.frozen(y)
        pooled = y.mean((2, 3))
        return self.last(torch.tanh(self.head(pooled))) * self.scale


def made(kind=Net):
    torch.manual_seed(3)
    return kind().double()


def inputs(at=0):
    torch.manual_seed(50 + at)
    return torch.randn(SHAPE, dtype=torch.float64)


def loss_of(y):
    return (y - 0.3).square().mean() + y.abs().amax()


def split_as(model, x):
    """The input as a model of split tensors gets it, or as it is."""
    return model.distributed.cut(x) if hasattr(model, "distributed") else x


def alike(split, alone, tolerance=1e-9):
    state = alone.state_dict()
    for key, value in split.state_dict().items():
        torch.testing.assert_close(
            value.cpu(), state[key], atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def both(act, make=made, tolerance=1e-9, grids=None, **options):
    """Run ``act(model)`` on a distributed model and on the same one alone; state and result are alike."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    for grid in grids or [f"{size}x1", f"1x{size}", *(["2x2"] if size == 4 else [])]:
        alone = make()
        split = distribute(copy.deepcopy(alone), grid, **options)
        try:
            torch.manual_seed(7)
            expected = act(alone)
            torch.manual_seed(7)
            found = act(split)
            alike(split, alone, tolerance)
            if expected is not None:
                found, expected = whole(found).detach().cpu(), expected.detach()
                assert ((found - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()
        finally:
            split.distributed.close()


def train_beside(model, grid, inputs, loss_fn, *, steps=3, rate=0.01):
    """Train by SGD, and evaluate: losses, parameters and buffers are those of the model alone.

    ``loss_fn`` takes the output of the model, which gets one input or a tuple of inputs.
    """

    def act(net):
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9), []
        for step in range(steps + 1):
            net.train(step < steps)
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            loss = loss_fn(net(*(x.double() for x in (inputs if isinstance(inputs, tuple) else (inputs,)))))
            loss.backward()
            optimizer.step()
            losses.append(whole(loss).detach())
        return torch.stack(losses)

    both(act, model.double, grids=[grid])


def beside_alone(make=made, **options):
    """Make of ``act(model)`` a test by ``both``."""

    def decorate(act):
        def test(comm):
            both(act, make, **options)

        return test

    return decorate


ROWS = {"grids": [{"H": -1}]}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(*parameters):
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def loop(model, optimizer, after=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(inputs(step)))
        loss.backward()
        if after is not None:
            after(step)
        optimizer.step()
    return whole(loss)

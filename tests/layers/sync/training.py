"""A small network, distributed and sequential, and its training."""

from functools import partial

import torch
from torch import nn

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss
from tests.layers.partitioned.sequential import grids, shard


class Scale(nn.Module):
    """A plain torch module with a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


class Spectral(nn.Module):
    """Complex parameters, as of spectral layers."""

    def __init__(self, dtype):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 3, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(3, dtype=dtype.to_real()))

    def forward(self, x):
        spectrum = torch.fft.rfft(x, n=4) @ self.weights.t() * (1 + 2j)
        return torch.fft.irfft(spectrum, n=3) + self.shift


def network(conv, norm):
    torch.manual_seed(3)
    return nn.Sequential(
        conv(3, 6, 3, padding=1, bias=False, dtype=torch.float64),
        norm(6, affine=True, dtype=torch.float64),
        nn.ReLU(inplace=True),
        conv(6, 6, 3, padding=2, dilation=2, dtype=torch.float64),
        nn.ReLU(inplace=True),
        Scale(),
        conv(6, 2, 3, stride=2, padding=1, dtype=torch.float64),
    )


def distributed(P_x):
    return network(partial(DistributedConv2d, P_x), partial(DistributedInstanceNorm2d, P_x))


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 3, 17, 13, dtype=torch.float64, generator=generator) for _ in range(4)]


def target():
    return torch.randn(3, 2, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def make(P_world, comm, grid=None, **options):
    """The distributed network, its sync, and a function that gives the loss of an input."""
    P_x = P_world.create_cartesian_topology_partition(grid or (1, 1, comm.size, 1))
    model, criterion = distributed(P_x), DistributedMSELoss(P_x)
    sync = GradientSync(model, P_world, **options)
    return model, sync, lambda at=0: criterion(model(shard(P_x, inputs()[at])), shard(P_x, target()))


def alone():
    """The sequential network, and such a function."""
    model = network(nn.Conv2d, nn.InstanceNorm2d)
    return model, lambda at=0: nn.functional.mse_loss(model(inputs()[at]), target())


def close_to(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


def train(model, loss_of, set_to_none=True):
    """Losses of some steps; optimizers read gradients one by one, or all at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=set_to_none)
    losses = []
    for at in range(len(inputs())):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(at)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_on_every_grid(P_world, comm, set_to_none=True, **options):
    """Losses and weights of a training are those of the sequential one, however the ranks cut images."""
    twin, loss_alone = alone()
    losses = train(twin, loss_alone)
    for grid in grids(comm.size, 2):
        model, sync, loss_of = make(P_world, comm, grid, **options)
        torch.testing.assert_close(train(model, loss_of, set_to_none), losses, rtol=1e-12, atol=0)
        close_to(model.parameters(), twin.parameters())
        sync.close()

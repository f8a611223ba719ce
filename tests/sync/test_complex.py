"""Complex parameters, as of spectral layers: summed, scaled and clipped as real ones."""

import math

import pytest
import torch
from torch import nn

from distdl_rma import DistributedGradScaler, GradientSync

pytestmark = pytest.mark.mpi


class Spectral(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 3, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(3, dtype=dtype.to_real()))

    def forward(self, x):
        spectrum = torch.fft.rfft(x, n=4) @ self.weights.t() * (1 + 2j)
        return torch.fft.irfft(spectrum, n=3) + self.shift


def gradients(net, xs, divisor=1):
    net.zero_grad()
    for x in xs:
        (net(x).pow(3).sum() / divisor).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_complex_gradients_are_those_of_all_ranks(P_world, comm, dtype, reduction):
    model, twin = Spectral(dtype), Spectral(dtype)
    twin.load_state_dict(model.state_dict())
    xs = torch.randn(comm.size, 5, 4, dtype=dtype.to_real())
    divisor = comm.size if reduction == "mean" else 1
    expected = gradients(twin, xs, divisor)
    with GradientSync(model, P_world, reduction=reduction) as sync:
        for _ in range(3):
            for mine, theirs in zip(gradients(model, [xs[comm.rank]]), expected, strict=True):
                torch.testing.assert_close(mine, theirs)
        if comm.size > 1:
            assert {row["nbytes"] for row in sync.describe()} == {
                p.numel() * p.element_size() for p in model.parameters()
            }
        for order in (2.0, 1.0, math.inf):
            gradients(model, [xs[comm.rank]]), gradients(twin, xs, divisor)
            norm = sync.clip_grad_norm_(0.1, order)
            wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, order)
            torch.testing.assert_close(norm.to(wanted.dtype), wanted)
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()


def test_the_gradients_of_complex_parameters_are_unscaled(P_world, comm):
    model = Spectral(torch.complex64)
    x = torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = DistributedGradScaler(P_world, init_scale=8.0)
    with GradientSync(model, P_world):
        expected = gradients(model, [x])
        optimizer.zero_grad()
        scaler.scale(model(x).pow(3).sum()).backward()
        scaler.unscale_(optimizer)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        bad = float("nan") if comm.rank == comm.size - 1 else 1.0
        scaler.scale(model(x).pow(3).sum() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0

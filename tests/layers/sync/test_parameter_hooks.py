"""Hooks of parameters of distributed models see, and change, the gradient that all ranks have together."""

import contextlib

import pytest
import torch
from torch import nn

from distdl_rma import UnsupportedError, distribute
from tests.layers.model.training import ROWS, beside_alone, inputs, loop, loss_of, made, sgd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]


def clamped(gradient):
    return gradient.clamp(-1e-2, 1e-2)


@beside_alone(**ROWS)
def test_hooks_that_are_not_linear(model):
    seen = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
            p.register_hook(clamped)
    loop(model, sgd(model))
    # Of a term in which nothing is cut, and of one more backward.
    model.zero_grad()
    model.scale.square().sum().backward()
    loss_of(model(inputs())).backward()
    return torch.stack(seen).sum()


def test_hooks_from_before_the_model_was_distributed(comm):
    alone, split = made(), made()
    for model in (alone, split):
        model.stem.weight.register_hook(clamped)
    distribute(split, {"H": -1})
    for model in (alone, split):
        loss_of(model(inputs())).backward()
    torch.testing.assert_close(split.stem.weight.grad, alone.stem.weight.grad, atol=1e-9, rtol=1e-9)
    split.distributed.close()


@beside_alone(**ROWS)
def test_hooks_under_no_sync_and_after_they_are_removed(model):
    handle, split = model.stem.weight.register_hook(clamped), getattr(model, "distributed", None)
    for step in range(4):
        quiet = split is not None and step in (0, 1)
        with split.no_sync() if quiet else contextlib.nullcontext():
            loss_of(model(inputs(step))).backward()
        if step == 2:
            handle.remove()
    return model.stem.weight.grad


class Spectral(nn.Module):
    """A parameter for each channel, in the Fourier domain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 1, 1, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x) * self.weight, s=x.shape[-2:])


@beside_alone(lambda: Spectral().double(), grids=[{"W": -1}])
def test_hooks_of_complex_parameters(model):
    model.weight.register_hook(lambda gradient: gradient / gradient.abs())
    model(inputs()).square().mean().backward()
    return model.weight.grad.abs()


@beside_alone()
def test_hooks_behind_accumulation_see_what_is_summed_and_accumulated(model):
    norms, optimizers = [], {}
    for p in [p for p in model.parameters() if p.requires_grad]:
        optimizers[p] = torch.optim.SGD([p], lr=0.1, momentum=0.9)

        def noted(p):
            assert not torch.is_grad_enabled()
            norms.append(p.grad.norm())

        def step(p):
            # Of two backwards together.
            if len(norms) % (2 * len(optimizers)) > len(optimizers):
                optimizers[p].step()
                optimizers[p].zero_grad()

        p.register_post_accumulate_grad_hook(noted)
        p.register_post_accumulate_grad_hook(step)
    model.stem.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    def twice(p):
        p.grad.mul_(2)
        once.remove()

    once = model.head.weight.register_post_accumulate_grad_hook(twice)
    for at in range(6):
        loss_of(model(inputs(at))).backward()
    return torch.stack(sorted(norms) + [p.norm() for p in model.parameters()]).detach()


@pytest.mark.mpi(min_size=2)
def test_hooks_behind_accumulation_are_refused_where_nothing_is_summed(comm):
    split = distribute(made(), {"H": -1})
    handle = split.stem.weight.register_post_accumulate_grad_hook(lambda _: None)
    loss = loss_of(split(inputs()))
    with split.distributed.no_sync(), pytest.raises(UnsupportedError, match=r"stem\.weight.*have not summed"):
        loss.backward()
    handle.remove()
    split.zero_grad()
    split.distributed.close()

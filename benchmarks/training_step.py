"""Steps of a training, of any model: what most suites measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def step_of(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, criterion: Callable[..., Any]
) -> Callable[[], object]:
    """A training step on one batch: forward, loss, backward, update."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad()
        criterion(model(x), target).backward()
        optimiser.step()

    return step


def forward_and_backward(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Forward, and backward from a gradient of the output."""
    x.grad = None
    module.zero_grad()
    module(x).backward(gradient)

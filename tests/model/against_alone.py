"""A distributed model trained beside the same model alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distdl_rma import distribute
from distdl_rma.split import SplitTensor

TOLERANCE = 1e-9


def trained(size: int) -> list[tuple[str, int]]:
    """Grids on which a model is trained, and for how many steps: rows, columns, of four ranks both at once.

    What goes wrong later than in the third step does so on two ranks.
    """
    return [("2x2", 3)] if size == 4 else [(f"{size}x1", 10 if size == 2 else 3), (f"1x{size}", 3)]


def whole(y: Any) -> Any:
    """All of a split tensor; anything else as it is."""
    return y.full_tensor() if isinstance(y, SplitTensor) else y


def train_beside(
    model: nn.Module,
    grid: Any,
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    loss_fn: Callable[[Any], torch.Tensor],
    *,
    steps: int = 3,
    rate: float = 0.01,
    tolerance: float = TOLERANCE,
) -> nn.Module:
    """Train both by SGD; losses, outputs, parameters and buffers are equal after every step, also in
    evaluation.

    Returns the distributed model. ``loss_fn`` takes the output of the model.
    """
    torch.manual_seed(1)
    alone = model.double()
    split = distribute(copy.deepcopy(alone), grid)
    both = [(each, torch.optim.SGD(each.parameters(), lr=rate, momentum=0.9)) for each in (alone, split)]
    xs = [x.double() for x in (inputs if isinstance(inputs, tuple) else (inputs,))]
    try:
        for mode in ("train", "eval"):
            alone.train(mode == "train")
            split.train(mode == "train")
            for step in range(steps if mode == "train" else 1):
                losses = []
                for net, optimizer in both:
                    torch.manual_seed(100 + step)
                    optimizer.zero_grad()
                    loss = loss_fn(net(*xs))
                    loss.backward()
                    optimizer.step()
                    losses.append(float(whole(loss).detach()))
                at = f"{mode}, step {step}"
                assert abs(losses[0] - losses[1]) <= tolerance * max(1, abs(losses[0])), (at, losses)
                state = alone.state_dict()
                for key, value in split.state_dict().items():
                    torch.testing.assert_close(
                        value,
                        state[key],
                        atol=tolerance,
                        rtol=tolerance,
                        msg=lambda m, k=key, w=at: f"{w}: {k}: {m}",
                    )
    finally:
        split.distributed.close()
    return split

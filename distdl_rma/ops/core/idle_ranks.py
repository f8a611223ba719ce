"""Results of ranks without a part in a computation, in a graph all the same: others wait for its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def idle(x: torch.Tensor, others: Iterable[torch.Tensor | None] = ()) -> torch.Tensor:
    """Output of an idle rank: a clone of its input without the elements, in the graph of all that is given.

    An input without elements keeps its shape, any other becomes one of shape (b, 0).
    """
    y = x.flatten()[:0].reshape(*x.shape[:1], 0) if x.numel() else x.clone()
    return tied(y, others)


def tied(y: torch.Tensor, others: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """``y`` in the graph of other tensors too, such as weights, whose gradients are then zero."""
    for other in others:
        if other is not None:
            y = y + other.flatten()[:0].sum()
    return y


def deliver(y: torch.Tensor, active: bool, batch: int | None) -> torch.Tensor:
    """Result of a rank: ``y``, or outside of the output partition a tensor without elements.

    The backward of an empty result reaches what ``y`` came from: other ranks wait for it there.
    """
    if active:
        return y
    return (y.flatten()[:0] if y.numel() else y).reshape((0,) if batch is None else (batch, 0))

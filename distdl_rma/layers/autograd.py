"""What the autograd operations of the layers share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from distdl_rma.errors import UnsupportedError

__all__ = ["anchor", "first_derivative"]


def anchor(needed: bool) -> torch.Tensor | None:
    """Input that keeps an operation in the graph of a rank whose own inputs need no gradient."""
    if not (needed and torch.is_grad_enabled()):
        return None
    return torch.empty(0, requires_grad=True)


def first_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Backward that refuses to be differentiated itself, instead of taking its result for a constant."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Grad mode is on in a backward only under create_graph.
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "distributed layers have no second derivatives: create_graph=True is refused"
            )
        return backward(ctx, *gradients)

    return checked

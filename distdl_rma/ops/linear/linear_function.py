"""``torch.nn.functional.linear`` whose gradients are written where they are wanted, into a bucket say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.ops.core.autograd import uncompiled

Offer = Callable[[str], "torch.Tensor | None"]


def linear_function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offer: Offer
) -> torch.Tensor:
    """``torch.nn.functional.linear`` of leaves whose gradients are computed in given places, without a copy.

    Weight and bias are parameters themselves, not what was computed from them: gradients are written in their
    type and shape. ``offer`` is asked once per backward and parameter, by ``"weight"`` or ``"bias"``: the
    place to write the gradient to, or None to return it in memory of its own.
    """
    y: torch.Tensor = _Linear.apply(x, weight, bias, offer)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offer: Offer
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offer = offer
        return F.linear(x, weight, bias)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (rows, columns), batch = weight.shape, x.shape[:-1].numel()
        # What is to be differentiated again cannot be written to a place.
        offer = _nothing if torch.is_grad_enabled() else ctx.offer
        d_y = gradient.reshape(batch, rows)
        d_weight = d_bias = None
        if needs_weight:
            d_weight = torch.mm(d_y.t(), x.reshape(batch, columns), out=offer("weight"))
        if needs_bias:
            d_bias = torch.sum(d_y, 0, out=offer("bias"))
        return torch.matmul(gradient, weight) if needs_x else None, d_weight, d_bias, None


def _nothing(_key: str) -> None:
    return None

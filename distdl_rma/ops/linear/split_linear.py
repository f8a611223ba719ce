"""The operator of all linear layers: inputs are gathered, multiplied by blocks of a weight, and summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds, OperatorFunction, uncompiled
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import GatherComputeScatter
from distdl_rma.ops.core.staged import movement_or_none
from distdl_rma.ops.linear.linear_grid import LinearGrid
from distdl_rma.ops.linear.zero_linear import ShardedMatrix, zero_linear

Offer = Callable[[str], "torch.Tensor | None"]


class SplitLinear(GatherComputeScatter):
    """``y = x W^T + b`` with ``W`` and ``b`` in blocks on a grid of ranks; output in balanced shards on P_y.

    With one column it is the all-gather form, with one row the reduce-scatter form. ``places`` is asked in
    each call who says where the gradients of parameters are to be written, if anybody does. In the ZeRO forms
    ``matrix`` gathers the weight, of which the data-parallel blocks keep shards; inputs of several shapes
    share one.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        grid: LinearGrid,
        P_y: Partition,
        dtype: torch.dtype,
        places: Callable[[], Offer | None] | None = None,
        matrix: ShardedMatrix | None = None,
    ) -> None:
        if source.shape[-1] != grid.in_features:
            raise ShapeError(
                f"global input {source.shape} has {source.shape[-1]} features, the layer takes"
                f" {grid.in_features}"
            )
        read, made = grid.inputs(source.shape), grid.outputs(source.shape)
        owned = Decomposition.balanced(P_y, made.shape)
        super().__init__(site, source.partition.active, grid.P_w.active, owned)
        self.gather = movement_or_none(site, source, read, dtype, "gather")
        self.scatter = movement_or_none(site, made, owned, dtype, "scatter")
        self._adds_bias, self._places, self._matrix = grid.adds_bias, places, matrix
        self._shape, self._dtype = read.box(site.machine.rank).shape, dtype

    def carry_out(self, needs: GradientNeeds, x: torch.Tensor, weights: Mapping[str, Any]) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight; blocking where that has to be gathered."""
        if not x.numel():
            # What has no elements may have come in any shape and type.
            x = x.to(self._dtype).reshape(self._shape)
        if self._matrix is None:
            return super().carry_out(needs, x, weights)
        return zero_linear(self._matrix, needs, x, weights["weight"], self._bias_among(weights))

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight."""
        weight, bias, offer = weights["weight"], self._bias_among(weights), self._places and self._places()
        # What was moved or cast on its way here is no leaf: its gradient is not yet the parameter's.
        if offer is not None and weight.is_leaf and (bias is None or bias.is_leaf):
            return linear_function(x, weight, bias, offer)
        return F.linear(x, weight, bias)

    def _bias_among(self, weights: Mapping[str, Any]) -> torch.Tensor | None:
        return weights.get("bias") if self._adds_bias else None


def linear_function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offer: Offer
) -> torch.Tensor:
    """``torch.nn.functional.linear`` of leaves whose gradients are computed in given places, without a copy.

    Weight and bias are parameters themselves, not what was computed from them: gradients are written in their
    type and shape. ``offer`` is asked once per backward and parameter, by ``"weight"`` or ``"bias"``: the
    place to write the gradient to, or None to return it in memory of its own.
    """
    y: torch.Tensor = _Linear.apply(x, weight, bias, offer)
    return y


class _Linear(OperatorFunction):
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

"""Plain tensors beside split tensors: whether a rank has a contribution to their gradient, or all of it.

A ``GradientSync`` sums the contributions to its parameters. Nothing else sums those to other plain tensors,
such as a learnable number in a loss, an input, or a result of ``full_tensor()``. Their gradients are summed
where the tensors are used, so that all ranks have the whole gradients.

    plain tensor beside a split one       its gradient on each rank      who sums
    parameter of a GradientSync           a contribution                 the GradientSync, at the end
    parameter, DDP or FSDP around it      a contribution                 these
    computed of such parameters           a contribution                 as for the parameters
    any other                             a contribution, then the sum   ``beside``, where it is used
    beside copies only                    the whole, alike on all ranks  nobody

A tensor that is computed of both kinds of leaves has no right answer: its gradient would have to be summed
for the ones, and must not be for the others. It is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.checks.gradient_origin import (
    ENDS_OF_BLOCKS,
    GradientCheck,
    nodes_behind,
    note_reached_full_tensor,
)
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative, is_synchronised
from distdl_rma.layers.split.calls.site import site_of, summed_elsewhere
from distdl_rma.layers.split.redistribution import SummedGradient, once
from distdl_rma.segments.machine import Machine

# Key in a node's metadata: its gradients reach parameters of a GradientSync.
_KNOWN = "distdl_rma"


class _Gathered(OperatorFunction):
    # Makes a plain tensor of a split one.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, partition: Partition) -> torch.Tensor:
        ctx.partition = partition
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if note_reached_full_tensor(ctx, is_synchronised):
            partition = ctx.partition
            GradientCheck.of(Machine.of(partition), partition.ranks).note("full_tensor()", gradient)
        return _handed_on(ctx, gradient)


@first_derivative
def _handed_on(_ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return gradient, None


def gathered(x: torch.Tensor, partition: Partition) -> torch.Tensor:
    """A replicated block as a plain tensor; every rank has its whole gradient."""
    return x if not x.requires_grad else _Gathered.apply(x, partition)


def beside(x: torch.Tensor, result: Decomposition) -> torch.Tensor:
    """A plain tensor for use beside blocks of ``result``; differentiable, its backward may block."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    if not (contributes(x) or summed_elsewhere()):
        if not result.cut_dims:
            # All ranks compute the same gradient.
            return x
        partition = result.partition
        site = site_of(Machine.of(partition), plain_tensor)
        x = SummedGradient.apply(x, site, partition.ranks, "")
    return once(x, result)


def plain_tensor() -> None:
    """Its name is that of the sites at which such gradients are summed."""


def contributes(x: torch.Tensor) -> bool:
    """Whether the gradient of a plain tensor is summed later, as that of a parameter of a ``GradientSync``.

    Looks at the leaves of its graph, and marks the nodes, so that the next use of it ends there.
    ``UnsupportedError`` if it is computed of parameters of a ``GradientSync`` and of other leaves.
    """
    if x.grad_fn is None:
        return is_synchronised(x)
    ours = others = False
    nodes: list[Any] = []
    for node in nodes_behind([x.grad_fn], lambda node: _KNOWN in node.metadata or node.name() == _BOUNDARY):
        leaf = getattr(node, "variable", None)
        if leaf is None:
            # Not kept for leaves: the node of a leaf may outlive the GradientSync.
            nodes.append(node)
        if _KNOWN in node.metadata or (leaf is not None and is_synchronised(leaf)):
            ours = True
        elif leaf is not None or node.name() == _BOUNDARY:
            others = True
    if ours and others:
        raise UnsupportedError(
            "a plain tensor that is computed of parameters of a distributed model and of other learnable"
            " tensors meets a split one: their gradients are summed at different times; let these meet split"
            " tensors one after the other, or put all of them into the model"
        )
    if ours:
        for node in nodes:
            node.metadata[_KNOWN] = True
    return ours


_BOUNDARY = f"{_Gathered.__name__}Backward"
ENDS_OF_BLOCKS.add(_BOUNDARY)

"""Puts results of autograd functions, a user's or torch's for hooks, into the graph of blocks.

torch runs an autograd function on split tensors like any other: the functions in its forward and backward use
their rules. But torch links the split tensors, not their blocks. So the block of a result gets a node
(``_Result``) at its first use. This node keeps the gradient of the result. All results of a call share one
further node (``_Arguments``). It passes the kept gradients to torch's node, once, and passes the gradients
that result to the blocks of the arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from distdl_rma.checks.gradient_origin import nodes_behind
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.segments.transport.turns import of_each_rank
from distdl_rma.split import layout as lay
from distdl_rma.split.plain_operands import beside

# Metadata keys of torch's node of a call: the ``_Call``; a mark that its results only went into another call.
_CALL, _INNER = "distdl_rma call", "distdl_rma inner"
# A re-entrant checkpoint recomputes in a backward of its own, before gradients of parameters are summed.
_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# Nodes of autograd functions whose backward runs now.
_RUNNING: list[Any] = of_each_rank()


def runs() -> bool:
    """Whether the backward of an autograd function of split tensors runs, with split gradients."""
    return bool(_RUNNING)


class _Call:
    # A call of an autograd function. Torch's node refers to it; ``node`` is only set during a backward.
    def __init__(self, node: Any, kind: Any, layout: Decomposition) -> None:
        self.kind, self.partition = kind, layout.partition
        self.sources = _sources_of(node, kind)
        self.layouts = [
            x._layout if isinstance(x, kind) else lay.replicated(self.partition, x.shape)
            for x in self.sources
        ]
        # Set during a backward: the gradients of results that arrived, and torch's node.
        self.gradients: dict[int, torch.Tensor] = {}
        self.node: Any = None
        blocks = [
            x._local if isinstance(x, kind) else beside(x, layout)
            for x, layout in zip(self.sources, self.layouts, strict=True)
        ]
        self.token = _Arguments.apply(weakref.ref(self), Machine.of(self.partition), *blocks)

    def gradients_of_sources(self) -> list[torch.Tensor | None]:
        """Blocks of the gradients, by the function's own backward; None for a source without a gradient."""
        node, gradients, self.node, self.gradients = self.node, self.gradients, None, {}
        ends = tuple(GradientEdge(node, number) for number in gradients)
        engine, given = torch.autograd.Variable._execution_engine, (*gradients.values(),)
        # Hooks of sources, as of a GradientSync, run when ``_Arguments`` returns the gradients, not here.
        hooks = [(x._backward_hooks, [*x._backward_hooks.items()]) for x in self.sources if x._backward_hooks]
        for registered, _ in hooks:
            registered.clear()
        _RUNNING.append(node)
        try:
            # create_graph is False, allow_unreachable True, accumulate_grad False.
            how = _keeps_graph(), False, (*self.sources,), True, False
            found: Any = engine.run_backward(ends, given, *how)
        finally:
            _RUNNING.pop()
            for registered, before in hooks:
                registered.update(before)
        return [
            self._block(each, layout) if each is not None else None
            for each, layout in zip(found, self.layouts, strict=True)
        ]

    def _block(self, gradient: Any, layout: Decomposition) -> torch.Tensor:
        if not isinstance(gradient, self.kind):
            # A plain gradient is whole on every rank.
            block: torch.Tensor = gradient[layout.slices()]
        else:
            same_layout = gradient if gradient._layout is layout else gradient.redistribute(layout=layout)
            block = same_layout._local
        return block


def _sources_of(end: Any, kind: Any) -> list[Any]:
    # Tensors in the graph that a call got, also through calls whose results only went into this one.
    found: dict[int, Any] = {}
    seen, ahead = {end}, [end]
    while ahead:
        node = ahead.pop()
        if isinstance(node, _REENTRANT):
            raise TypeError("is that of a re-entrant checkpoint: pass use_reentrant=False to checkpoint()")
        if not isinstance(node, BackwardCFunction):
            plain = "takes a plain tensor that was computed with a gradient"
            raise TypeError("is not one of Python" if node is end else plain)
        if (_INNER if node is end else _CALL) in node.metadata:
            raise TypeError("is one of two, of which one takes what the other returns; clone() that before")
        if node is not end:
            node.metadata[_INNER] = True
        for each, _ in node.next_functions:
            x = getattr(each, "variable", None)
            if x is None and each is not None and each not in seen:
                seen.add(each)
                ahead.append(each)
            elif x is not None:
                changed = isinstance(x, kind) and x._local.grad_fn
                if changed and changed._sequence_nr() > node._sequence_nr():
                    raise TypeError("takes a tensor that was changed in place before its result was used")
                found[id(x)] = x
    return [*found.values()]


class _Arguments(OperatorFunction):
    # Its backward runs once the gradients of all results have arrived. Its result has no elements.
    @staticmethod
    def forward(ctx: Any, call: Any, machine: Machine, *blocks: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.machine = call, machine
        return blocks[0].new_empty(0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, _nothing: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.call().gradients_of_sources()


class _Result(OperatorFunction):
    @staticmethod
    def forward(
        ctx: Any, block: torch.Tensor, _token: torch.Tensor, node: Any, number: int, layout: Decomposition
    ) -> torch.Tensor:
        ctx.node, ctx.number, ctx.layout = node, number, layout
        # A view of an argument stays a view, so that torch refuses changes in place.
        return block.view_as(block) if block._is_view() or block.requires_grad else block.detach()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.node.metadata[_CALL]
        call.node, call.gradients[ctx.number] = ctx.node, call.kind(gradient, ctx.layout)
        return None, gradient.new_empty(0), None, None, None


def is_lost(ends: Sequence[torch.Tensor], kind: Any) -> bool:
    """Whether a gradient reaches a split tensor itself and not its block, so that the block gets none.

    This happens if an autograd function of a split tensor returns a plain tensor.
    """
    nodes = nodes_behind(x.grad_fn for x in ends)
    return any(isinstance(getattr(node, "variable", None), kind) for node in nodes)


def enter_graph(x: Any) -> None:
    """Put the block of an autograd result into the graph of blocks; ``TypeError`` if impossible."""
    node, number = x.grad_fn, x.output_nr
    with torch.enable_grad():
        call = node.metadata.get(_CALL)
        if call is None:
            call = _Call(node, type(x), x._layout)
            node.metadata[_CALL] = call
        block = _Result.apply(x._local, call.token, node, number, x._layout)
    # From here on it is a leaf of torch's graph, and only its block is in a graph.
    x.detach_()
    x._local = block
    x.requires_grad_()

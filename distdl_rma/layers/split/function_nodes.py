"""Puts results of autograd functions, a user's or torch's for hooks, into the graph of blocks.

There are two graphs. Functions of torch act on blocks, so these are in a graph that leads from the loss to
the parameters. But an autograd function gets split tensors, and torch puts *these* into a graph of its own:

    torch's graph      x (split) ---- Round ----> y (split)        nothing leads from y to a block
    graph of blocks    block of x                 block of y  ---- loss

torch runs an autograd function on split tensors like any other: the functions in its forward and backward use
their rules. But torch links the split tensors, not their blocks. So the block of a result gets a node
(``_Result``) at its first use. This node keeps the gradient of the result. All results of a call share one
further node (``_Arguments``). It passes the kept gradients to torch's node, once, and passes the gradients
that result to the blocks of the arguments.

While a function runs, an argument whose block is in a graph gets a node, too (``_Port``), at which the
function's own backward ends. So torch lets the function change the argument in place, as one that is no leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge

from distdl_rma.errors import UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.checks.gradient_origin import nodes_behind
from distdl_rma.layers.ops.core.autograd import OperatorFunction, anchor, first_derivative
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.plain_operands import beside
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.virtual_ranks.turns import of_each_rank

# Metadata key of torch's node of a call: the ``_Call``.
_CALL = "distdl_rma call"
OF_NO_BLOCK = (
    "an autograd function returned a plain tensor of a split one, whose block would get no gradient; let the"
    " function return a split tensor, and call full_tensor() before or behind it"
)
# A re-entrant checkpoint recomputes in a backward of its own, before gradients of parameters are summed.
_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# Nodes of autograd functions whose backward runs now.
_RUNNING: list[Any] = of_each_rank()


def runs() -> bool:
    """Whether the backward of an autograd function of split tensors runs, with split gradients."""
    return bool(_RUNNING)


class _Call:
    # A call of an autograd function. Torch's node refers to it; ``node`` is only set during a backward: for
    # good, both would keep each other alive, with all that the function has saved.
    def __init__(self, node: Any, kind: Any, layout: Decomposition, at_once: bool) -> None:
        self.kind, self.partition = kind, layout.partition
        found = _sources_of(node, kind, at_once)
        # A port ends the function's own backward; its argument would refer to itself, if it was changed.
        self.sources = [GradientEdge(x, 0) if isinstance(x, _PORT) else x for x in found]
        self.layouts = [
            x._layout if isinstance(x, (kind, _PORT)) else lay.replicated(self.partition, x.shape)
            for x in found
        ]
        # Set during a backward: the gradients of results that arrived, and torch's node.
        self.gradients: dict[int, torch.Tensor] = {}
        self.node: Any = None
        blocks = [
            x._local if isinstance(x, (kind, _PORT)) else beside(x, layout)
            for x, layout in zip(found, self.layouts, strict=True)
        ]
        for x in found:
            if isinstance(x, _PORT):
                x._local = None
        self.token = _Arguments.apply(weakref.ref(self), Machine.of(self.partition), *blocks)

    def gradients_of_sources(self) -> list[torch.Tensor | None]:
        """Blocks of the gradients, by the function's own backward; None for a source without a gradient."""
        node, gradients, self.node, self.gradients = self.node, self.gradients, None, {}
        ends = tuple(GradientEdge(node, number) for number in gradients)
        engine, given = torch.autograd.Variable._execution_engine, (*gradients.values(),)
        # Hooks of sources, as of a GradientSync, run when ``_Arguments`` returns the gradients, not here.
        all_hooks = [getattr(x, "_backward_hooks", None) for x in self.sources]
        hooks = [(each, [*each.items()]) for each in all_hooks if each]
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
        # A plain gradient is whole on every rank.
        split = isinstance(gradient, self.kind)
        return gradient.redistribute(layout=layout)._local if split else gradient[layout.slices()]


def _sources_of(node: Any, kind: Any, at_once: bool) -> list[Any]:
    # The tensors in the graph that a call got, or their ports. Right behind the call, a later node of a block
    # is that of a view, which torch makes again after a change in place.
    if isinstance(node, _REENTRANT):
        raise TypeError("is that of a re-entrant checkpoint: pass use_reentrant=False to checkpoint()")
    if not isinstance(node, BackwardCFunction):
        raise TypeError("is not one of Python")
    found: dict[int, Any] = {}
    for each, _ in node.next_functions:
        x = each if isinstance(each, _PORT) else getattr(each, "variable", None)
        if x is None and each is not None:
            raise TypeError("takes a plain tensor that was computed with a gradient")
        if x is not None:
            changed = isinstance(x, (kind, _PORT)) and x._local.grad_fn
            if changed and not at_once and changed._sequence_nr() > node._sequence_nr():
                raise TypeError("takes a tensor that was changed in place before its result was used")
            found[id(x)] = x
    return [*found.values()]


class _Port(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, _root: torch.Tensor, given: tuple[Any]) -> torch.Tensor:
        (x,) = given
        ctx._local, ctx._layout = x._local, x._layout
        return x

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> tuple[None, None]:
        # The backward of a call ends before; a result that is no split tensor has no call.
        raise UnsupportedError(f"backward: {OF_NO_BLOCK}")


_PORT: Any = _Port._backward_cls


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
        ctx: Any,
        block: torch.Tensor,
        _token: torch.Tensor,
        node: Any,
        number: int,
        layout: Decomposition,
        changed: bool,
    ) -> torch.Tensor:
        ctx.node, ctx.number, ctx.layout, ctx.changed = node, number, layout, changed
        if changed:
            ctx.mark_dirty(block)
            return block
        # A view of an argument stays a view, so that torch refuses changes in place.
        return block.view_as(block) if block._is_view() or block.requires_grad else block.detach()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.node.metadata[_CALL]
        call.node, call.gradients[ctx.number] = ctx.node, call.kind(gradient, ctx.layout)
        # Of a view that changed, torch drops the gradient of the rest of its base where this one is None.
        nothing = torch.zeros_like(gradient) if ctx.changed else None
        return nothing, gradient.new_empty(0), None, None, None, None


def is_lost(ends: Sequence[torch.Tensor], kind: Any) -> bool:
    """Whether a gradient reaches a split tensor itself and not its block, so that the block gets none.

    This happens if an autograd function of a split tensor returns a plain tensor.
    """
    nodes = nodes_behind(x.grad_fn for x in ends)
    return any(isinstance(node, _PORT) or isinstance(getattr(node, "variable", None), kind) for node in nodes)


def open_port(x: Any) -> Any:
    """Give a tensor a node of torch's graph, if its block has one of the graph of blocks; return the node."""
    if x._local.grad_fn is not None and x.grad_fn is None:
        x.requires_grad_(False)
        # As a result, not as an argument, so that torch sets the node of the same tensor.
        _Port.apply(anchor(True), (x,))
    return x.grad_fn


def enter_graph(x: Any, changed: bool = False) -> None:
    """Put the block of an autograd result into the graph of blocks; ``TypeError`` if impossible.

    ``changed`` says that the function changed its argument ``x``; the block and its views stay the same.
    """
    node, number = x.grad_fn, x.output_nr
    # Torch counted the change, and the function may have saved what it made.
    with torch.enable_grad(), _unsafe_preserve_version_counter(x._local):
        call = node.metadata.get(_CALL)
        if call is None:
            call = _Call(node, type(x), x._layout, changed)
            node.metadata[_CALL] = call
        block = _Result.apply(x._local, call.token, node, number, x._layout, changed)
    # From here on it is a leaf of torch's graph, and only its block is in a graph.
    x.detach_()
    x._local = block
    if not changed:
        x.requires_grad_()

"""What autograd functions return of split tensors, a user's own or torch's for hooks, in the graph of blocks.

torch runs such a function on split tensors as on any: the functions in its forward and backward go by their
rules. But it links the split tensors, whose blocks know nothing of that. So when a result is first used its
block gets a node, which keeps the gradient of the result; behind those of all results of a call stands one
more, which passes these gradients to torch's node, once, and what comes out to the blocks of the arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.split import layout as lay
from distdl_rma.split.plain_operands import beside

# What torch's node of a call keeps: the call, or that its results went into another one.
_CALL, _INNER = "distdl_rma call", "distdl_rma inner"
# Recomputes in a backward of its own, in which the gradients of parameters are not summed yet.
_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction._backward_cls
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# Backwards of calls that run now.
_RUNNING: list[Any] = []


def runs() -> bool:
    """Whether the backward of an autograd function of split tensors runs, with gradients that are split."""
    return bool(_RUNNING)


class _Call:
    # A call of an autograd function. Its node has it, and so it does not have the node.
    def __init__(self, node: Any, kind: Any, layout: Decomposition) -> None:
        self.kind, self.partition = kind, layout.partition
        self.sources = _sources_of(node, kind)
        self.layouts = [
            x._layout if isinstance(x, kind) else lay.replicated(self.partition, x.shape)
            for x in self.sources
        ]
        # Of the results that the running backward came by, and the node of the call.
        self.gradients: dict[int, torch.Tensor] = {}
        self.node: Any = None
        blocks = [
            x._local if isinstance(x, kind) else beside(x, layout)
            for x, layout in zip(self.sources, self.layouts, strict=True)
        ]
        self.token = _Arguments.apply(weakref.ref(self), Machine.of(self.partition), *blocks)

    def gradients_of_sources(self) -> list[torch.Tensor | None]:
        """By the function's own backward, of blocks; None where there is none."""
        node, gradients, self.node, self.gradients = self.node, self.gradients, None, {}
        ends = tuple(GradientEdge(node, number) for number in gradients)
        engine, given = torch.autograd.Variable._execution_engine, (*gradients.values(),)
        # Hooks of sources, as of a GradientSync, are called when the gradients come out of this node.
        hooks = [(x._backward_hooks, [*x._backward_hooks.items()]) for x in self.sources if x._backward_hooks]
        for registered, _ in hooks:
            registered.clear()
        _RUNNING.append(node)
        try:
            # No graph of it; a source may be without a gradient; nothing goes to .grad.
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
            # Plain ones are whole.
            block: torch.Tensor = gradient[layout.slices()]
        else:
            cut_alike = gradient if gradient._layout is layout else gradient.redistribute(layout=layout)
            block = cut_alike._local
        return block


def _sources_of(end: Any, kind: Any) -> list[Any]:
    # The tensors that a call, with those between whose results only went on into it, was given in the graph.
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
    # Where the gradients of all results have come: what goes out of it is without elements.
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
        # What shows the memory of an argument stays a view, which torch lets nobody change in place.
        return block.view_as(block) if block._is_view() or block.requires_grad else block.detach()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.node.metadata[_CALL]
        call.node, call.gradients[ctx.number] = ctx.node, call.kind(gradient, ctx.layout)
        return None, gradient.new_empty(0), None, None, None


def is_lost(ends: Sequence[torch.Tensor], kind: Any) -> bool:
    """Whether a gradient of these comes to a split tensor itself: its block gets none of it.

    So it is where an autograd function of a split tensor returns a plain one.
    """
    seen, ahead = set[Any](), [x.grad_fn for x in ends]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), kind):
            return True
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
    return False


def enter_graph(x: Any) -> None:
    """Put the block of what an autograd function returned into the graph of blocks; ``TypeError`` if not."""
    node, number = x.grad_fn, x.output_nr
    with torch.enable_grad():
        call = node.metadata.get(_CALL)
        if call is None:
            call = _Call(node, type(x), x._layout)
            node.metadata[_CALL] = call
        block = _Result.apply(x._local, call.token, node, number, x._layout)
    # From here on it is as any.
    x.detach_()
    x._local = block
    x.requires_grad_()

"""Notes which module of a distributed model runs.

Every module of the model has a pre-hook that puts it on the thread's stack, and a hook that takes it off.
Rules read the top of the stack: the path for names and messages, and whether operands may move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.split.calls import site
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.tensor import SplitTensor, into_graph

# Hooks that torch runs for all modules.
_OF_ALL, _BEFORE_ALL = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


class ModuleHook:
    """Forward pre-hook that puts the module on the stack."""

    def __init__(self, path: str, moves: bool, elsewhere: bool) -> None:
        self.entry: site.RunningModule = path or "model", moves, elsewhere

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin the module; ``site.pop_module`` ends it."""
        site.THREAD.stack.append(self.entry)
        if (
            module._backward_hooks or module._backward_pre_hooks or _OF_ALL or _BEFORE_ALL
        ) and torch.is_grad_enabled():
            self._prepare(module, args)

    def _prepare(self, module: nn.Module, args: Any) -> None:
        # For backward hooks, torch passes inputs and outputs through an autograd function, whose node has the
        # hooks. Split tensors that went through it have a node in torch's graph, and their blocks do not know
        # of it yet: ``into_graph`` puts the blocks behind it, before the module and behind it.
        if False in (module._is_full_backward_hook, torch_module._global_is_full_backward_hook):
            raise UnsupportedError(
                f"{self.entry[0]}: register_backward_hook shows a node of the graph of blocks; call"
                " register_full_backward_hook"
            )
        for x in tensors_in(args):
            if isinstance(x, SplitTensor):
                into_graph(x)
        handle: Any = None

        def last(_module: nn.Module, given: Any, found: Any) -> None:
            handle.remove()
            for x in (*given, *(found if isinstance(found, tuple) else (found,))):
                if isinstance(x, SplitTensor):
                    into_graph(x)
                elif isinstance(x, torch.Tensor) and x.requires_grad:
                    raise UnsupportedError(
                        f"{self.entry[0]}: a backward hook of a module would see the part of this rank in the"
                        " gradient of a plain tensor that goes in or out"
                    )

        handle = module.register_forward_hook(last, always_call=True)

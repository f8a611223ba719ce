"""Notes which module of a distributed model runs, and whether only torch's code calls functions in it.

Every module of the model has a pre-hook that puts it on the thread's stack, and a hook that takes it off.
Rules read the top of the stack: the path for names and messages, and whether operands may move.

The place of a call is the user's innermost line. In a module of torch, such as ``nn.Conv2d``, that is the
line that called the module, found by walking over a dozen frames of torch. A ``Sequential`` of such modules
has one line for all of them, so the first call finds it and the others take it (``known``):

    model(x)                  the user's line
      Sequential.forward      torch's code, only calls modules       known = [] -> [place]
        Conv2d.forward        torch's code, no children              known = the same list
        ReLU.forward          torch's code, no children              known = the same list
        MyBlock.forward       the user's code                        known = None: lines of its own

If the user has a hook on a module, or replaced its forward, the user's code runs in it: ``known`` is None.
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
    """Forward pre-hook that puts the module on the stack, with a known place of calls where there is one."""

    def __init__(self, path: str, module: nn.Module, moves: bool, elsewhere: bool) -> None:
        self.place = path or "model", moves, elsewhere
        # Numbers of ``distribute``'s own hooks, before and after the forward; others are the user's.
        self.hooks = (1, 1) if path else (3, 2)
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Read the module's type and children."""
        # Whether it is a Sequential, which only calls modules, or a module of torch without children.
        self.in_turn = type(module) is nn.Sequential
        self.alone = type(module).__module__.startswith("torch.nn.modules.") and not module._modules

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin the module; ``site.pop_module`` ends it."""
        known = site.THREAD.stack[-1][3] if self.in_turn or self.alone else None
        if known is None and self.in_turn:
            known = []
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        if hooks != self.hooks or "forward" in module.__dict__:
            # The user's code runs in it.
            known = None
        site.THREAD.stack.append((*self.place, known, self.alone))
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
                f"{self.place[0]}: register_backward_hook shows a node of the graph of blocks; call"
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
                        f"{self.place[0]}: a backward hook of a module would see the part of this rank in the"
                        " gradient of a plain tensor that goes in or out"
                    )

        handle = module.register_forward_hook(last, always_call=True)

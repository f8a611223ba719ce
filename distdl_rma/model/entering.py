"""Which module of a distributed model runs, and whether it calls functions by code of torch's alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distdl_rma.errors import UnsupportedError
from distdl_rma.split.calls import site


class Enter:
    """Hook of a module: calls from here on are those of its path, and may be known to be of one place."""

    def __init__(self, path: str, module: nn.Module, moves: bool, elsewhere: bool) -> None:
        self.place = path or "model", moves, elsewhere
        # The outermost module has more hooks that are no user's.
        self.hooks = (1, 1) if path else (3, 2)
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """See what the module is now."""
        # Whether it only calls modules in turn, or functions alone, by code of torch.
        self.in_turn = type(module) is nn.Sequential
        self.alone = type(module).__module__.startswith("torch.nn.modules.") and not module._modules

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Begin the module; ``site.leave`` ends it."""
        known = site.THREAD.stack[-1][3] if self.in_turn or self.alone else None
        if known is None and self.in_turn:
            known = []
        if known is not None and self._runs_more(module):
            known = None
        site.THREAD.stack.append((*self.place, known, self.alone))
        if (module._backward_hooks or module._backward_pre_hooks) and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{self.place[0]}: backward hooks of modules come from a graph that split tensors do not"
                " have; call register_hook on its input or output in a forward hook instead"
            )

    def _runs_more(self, module: nn.Module) -> bool:
        # Code of the user, in hooks or in the place of its forward.
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        return hooks != self.hooks or "forward" in module.__dict__

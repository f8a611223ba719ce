"""Rules of a user's own: for a function of torch or of another library, or for a kind of module."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from distdl_rma.errors import ArgumentError
from distdl_rma.split.calls.table import RULES, Rule
from distdl_rma.split.tensor import SplitTensor, composed, tensors_in

# Where a class keeps the forward that it had.
_PLAIN = "_without_split_tensors"


def register(what: Any, handler: Callable[..., Any]) -> None:
    """Say how a function, or a kind of module, acts on split tensors; local, for all that follows.

    Parameters
    ----------
    what
        A function that torch hands to tensors of other classes, as ``torch.special.i0`` or one of your own
        that uses ``torch.overrides``; or a class of modules.
    handler
        Called with what the user passed, as ``handler(function, *args, **kwargs)`` or ``handler(module,
        *args, **kwargs)``, when a split tensor is among it; what it returns the user gets. ``to_local()``,
        ``decomposition``, ``redistribute()`` and ``SplitTensor.from_local`` are what it is made of.
    """
    if isinstance(what, type) and issubclass(what, nn.Module):
        _register_module(what, handler)
    elif callable(what):
        RULES[what] = Rule("registered", lambda func, args, kwargs: _called(handler, func, args, kwargs))
    else:
        raise ArgumentError(f"register: takes a function or a class of modules, got {what!r}")


def _called(handler: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    # In here functions of split tensors go by their rules, as everywhere in a program.
    return composed(handler, func, *args, **kwargs)


def _register_module(kind: type[nn.Module], handler: Callable[..., Any]) -> None:
    plain = getattr(kind.forward, _PLAIN, kind.forward)

    @wraps(plain)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, SplitTensor) for x in tensors_in(args, kwargs)):
            return handler(module, *args, **kwargs)
        return plain(module, *args, **kwargs)

    setattr(forward, _PLAIN, plain)
    kind.forward = forward

"""Users' own rules: for functions of torch or of other libraries, and for kinds of modules.

There are three doors by which a call with split tensors can reach a rule:

- A function that torch dispatches (``torch.overrides``): the table of rules is enough.
- ``Function.apply`` of an autograd function, which torch does not dispatch: its ``apply`` is replaced by one
  that does, for the registered class alone.
- ``forward`` of a class of modules: replaced by one that calls the user's handler if a split tensor comes in.

A replaced method keeps the original one as an attribute, so that a second ``register`` replaces the rule and
does not wrap the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ArgumentError
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.table import RULES, Rule
from distdl_rma.layers.split.operands import as_blocks, common_layout, site_for
from distdl_rma.layers.split.tensor import SplitTensor, composed, refused

# Attribute of a replaced method that has the original one.
_PLAIN = "_without_split_tensors"


def register(what: Any, handler: Callable[..., Any] | None = None, *, elementwise: bool = False) -> None:
    """Set how a function, or a kind of module, acts on split tensors; local, for all later calls.

    Parameters
    ----------
    what
        A function that torch dispatches to other tensor classes, such as ``torch.special.i0`` or one of your
        own that uses ``torch.overrides``; or a class of modules; or, with ``elementwise``, a subclass of
        ``torch.autograd.Function``, which otherwise acts by the rules of the functions that it calls.
    handler
        Called as ``handler(function, *args, **kwargs)`` or ``handler(module, *args, **kwargs)``, with the
        user's arguments, if a split tensor is among them; the user gets its result. Its usual parts are
        ``to_local()``, ``decomposition``, ``redistribute()`` and ``SplitTensor.from_local``.
    elementwise
        In place of a handler. Each element of the result, one tensor or several, depends only on the elements
        at the same place of the broadcast arguments. So every rank calls it with blocks, also in the
        backward.

    Examples
    --------
    >>> class Round(torch.autograd.Function):  # its gradient is that of the identity
    ...     forward = staticmethod(lambda ctx, x: x.round())
    ...     backward = staticmethod(lambda ctx, gradient: gradient)
    >>> register(Round, elementwise=True)
    >>> Round.apply(shard({"H": -1}, torch.full((1, 1, 4, 4), 1.6))).mean().item()
    2.0
    """
    if elementwise is not (handler is None):
        raise ArgumentError(f"register: takes a handler, or elementwise=True without one, for {what!r}")
    if handler is None:
        _register_elementwise(what)
    elif isinstance(what, type) and issubclass(what, nn.Module):
        _register_module(what, handler)
    elif callable(what):
        # Within the handler, functions of split tensors use their rules.
        RULES[what] = Rule("registered", lambda func, args, kw: composed(handler, func, *args, **kw))
    else:
        raise ArgumentError(f"register: takes a function or a class of modules, got {what!r}")


def _register_elementwise(what: Any) -> None:
    if not isinstance(what, type) and callable(what):
        RULES[what] = Rule("pointwise", partial(_by_elements, what))
        return
    if not isinstance(what, type) or not issubclass(what, torch.autograd.Function):
        raise ArgumentError(
            f"register: takes a function or an autograd function as elementwise, got {what!r}"
        )
    applied: Any = what.apply
    plain = getattr(applied, _PLAIN, applied.__func__)

    @wraps(plain)
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        split = [x for x in tensors_in(args, kwargs) if isinstance(x, SplitTensor)]
        if kind is what and split:
            return torch.overrides.handle_torch_function(what, split, *args, **kwargs)
        return plain(kind, *args, **kwargs)

    setattr(apply, _PLAIN, plain)
    what.apply = classmethod(apply)  # type: ignore[assignment]
    RULES[what] = Rule("pointwise", partial(_by_elements, partial(plain, what)))


def _by_elements(compute: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    # Every rank calls ``compute`` with its parts of the operands. One that the function changes and returns
    # is the user's split tensor again.
    operands = tensors_in(args, kwargs)
    result = common_layout(func, operands)
    parts, options = as_blocks(site_for(func, *operands), (args, kwargs), result)
    blocks, wanted = tensors_in(parts, options), result.own_box.shape

    def split(y: torch.Tensor) -> torch.Tensor:
        if tuple(y.shape) != wanted:
            raise refused(func, f"it is registered as elementwise, and returns {tuple(y.shape)} for {wanted}")
        changed = next((x for x, each in zip(operands, blocks, strict=True) if each is y), None)
        if changed is None:
            return SplitTensor(y, result)
        if not isinstance(changed, SplitTensor) or changed._local is not y:
            raise refused(func, "it changes a tensor in place that had to move")
        return changed

    return mapped(split, compute(*parts, **options))


def _register_module(kind: type[nn.Module], handler: Callable[..., Any]) -> None:
    plain = getattr(kind.forward, _PLAIN, kind.forward)

    @wraps(plain)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, SplitTensor) for x in tensors_in(args, kwargs)):
            return handler(module, *args, **kwargs)
        return plain(module, *args, **kwargs)

    setattr(forward, _PLAIN, plain)
    kind.forward = forward

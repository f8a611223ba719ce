"""The table of torch's functions: by which rule each one acts on split tensors, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.split.calls.autocast import is_cast

# What a rule is given: the function, its arguments as the user passed them; it returns what the user gets.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A function and its arguments, as the user called it.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """How functions of one kind act on split tensors.

    Kinds whose ranks exchange data are ``window``, ``norm``, ``reduction``, ``loss``, ``movement`` and
    ``contraction``. Functions of blocks alone are ``pointwise``, ``random`` and ``creation``. A ``query``
    (shape, type) and a ``value`` need no other rank, so that one rank may call them alone. ``gradient`` is
    ``backward`` and what belongs to it; ``refused`` raises for cut tensors; ``copies`` are functions without
    a rule, of tensors that every rank holds; ``registered`` are rules of users.
    """

    kind: str
    handler: Handler
    says: str = ""  # what it does, where the docstring of its handler does not tell
    casts: str = ""  # the name by which autocast knows the function, if it changes what that is given
    asks_torch: bool = False  # whether the handler raises what torch refuses by itself


RULES: dict[Any, Rule] = {}
# Key of the rule for functions that have none.
WITHOUT_RULE = None
# What handlers have that raise what torch refuses by themselves.
ASKS_TORCH = "asks_torch"
# What is called instead of a rule's handler, with the rule first; the last one counts.
OBSERVERS: list[Callable[[Rule, Any, tuple[Any, ...], dict[str, Any]], Any]] = []
_PLACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.special, torch.linalg, torch.fft, torch._C._nn)
# Where those of ATen are, and what they are.
_OPERATORS = torch, torch.Tensor, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft  # type: ignore[attr-defined]
_OF_C = BuiltinFunctionType, MethodDescriptorType


def functions_named(name: str) -> Iterable[Any]:
    """All functions of torch with this name: as a method, in ``torch`` and in its modules of functions."""
    seen: list[Any] = []
    for place in _PLACES:
        found = getattr(place, name, None)
        if callable(found) and not isinstance(found, type) and not any(found is other for other in seen):
            seen.append(found)
    return seen


def twin_of(func: Any) -> Any:
    """What function an operator of ATen is, as ``torch.ops.aten.add.Tensor``; None if that has no rule."""
    packet = getattr(func, "overloadpacket", func)
    if getattr(packet, "_qualified_op_name", "") != f"aten::{getattr(packet, '__name__', '')}":
        return None
    # With the arguments of the operator: functions of C, those of methods only where there is no other.
    found = (getattr(place, packet.__name__, None) for place in _OPERATORS)
    return next((each for each in found if each in RULES and isinstance(each, _OF_C)), None)


def rule(kind: str, *names: Any, says: str = "") -> Callable[[Handler], Handler]:
    """Enter a handler for functions, or for all of torch's with some names."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            for function in functions_named(name) if isinstance(name, str) else (name,):
                # The name in torch's lists: that of ATen, or of the function of Python around it.
                known = [each for each in (getattr(function, "__name__", ""), name) if is_cast(each)]
                asks = getattr(handler, ASKS_TORCH, False)
                RULES[function] = Rule(kind, handler, says, known[0] if known else "", asks)
        return handler

    return enter


def name_of(function: Any) -> str:
    """What messages call a function: ``torch.nn.functional.conv2d``, ``Tensor.add``."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        described = getattr(function, "__self__", None)
        return f"Tensor.{getattr(described, '__name__', described)}"
    home = getattr(function, "__objclass__", None)
    if home is not None:
        return f"Tensor.{name}"
    module = getattr(function, "__module__", None) or "torch"
    module = {"torch._C._nn": "torch.nn.functional", "torch._C": "torch", "torch._tensor": "Tensor"}.get(
        module, module
    )
    return f"{module}.{name}" if name else repr(function)

"""The table of torch's functions: the rule by which each acts on split tensors, or is refused.

One name of torch is often several functions: ``torch.add``, ``Tensor.add``, ``torch.special.expit`` are
different objects with one meaning. ``@rule(kind, "name")`` enters all of them, so that no spelling of a call
misses its rule. A function that is not in the table has the rule of ``WITHOUT_RULE``, which refuses it if a
tensor is cut.

The table is filled by importing ``functions``; afterwards only ``register`` changes it. It does not depend on
ranks, layouts or models: the same object serves all virtual ranks of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.autocast import is_cast
from distdl_rma.segments.virtual_ranks.turns import of_each_rank

# Gets the function, its arguments and its keyword arguments from the user; returns the user's result.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A function and its arguments, as the user called it.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """How functions of one kind act on split tensors.

    The ranks exchange data for the kinds ``window``, ``norm``, ``reduction``, ``loss``, ``movement`` and
    ``contraction``. Functions of the kinds ``pointwise``, ``random`` and ``creation`` only compute on blocks.
    ``query`` (shape, dtype) and ``value`` need no other rank, so that one rank may call them alone.
    ``gradient`` is ``backward`` and related functions. ``refused`` raises for cut tensors; the reasons are in
    ``functions/refusals.py``. ``copies`` are functions without a rule, on tensors that every rank holds.
    ``registered`` are rules of users.

    The kind is more than a label: it decides whether ranks compare the call (``site.note``), whether an error
    in it concerns the other ranks, and whether a checkpoint must recompute it on all ranks or on none.
    """

    kind: str
    handler: Handler
    doc: str = ""  # what it does, if the docstring of its handler does not say it
    casts: str = ""  # the function's name in autocast's lists, if autocast converts its arguments
    errors: str = ""  # torch's errors: "first", before the handler is called; or by the handler's "own" calls


RULES: dict[Any, Rule] = {}
# Key of the rule for functions that have none.
WITHOUT_RULE = None
# The last one is called in place of a rule's handler, with the rule as first argument.
OBSERVERS: list[Callable[[Rule, Any, tuple[Any, ...], dict[str, Any]], Any]] = of_each_rank()
_NAMESPACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.special, torch.linalg, torch.fft, torch._C._nn)
# Modules with functions of ATen, and the types of these functions.
_OPERATORS = torch, torch.Tensor, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft  # type: ignore[attr-defined]
_OF_C = BuiltinFunctionType, MethodDescriptorType


def functions_named(name: str) -> Iterable[Any]:
    """All functions of torch with this name: methods, and functions of ``torch`` and its modules.

    Compared by identity: functions of torch's modules are often the same object under two names.
    """
    seen: list[Any] = []
    for place in _NAMESPACES:
        found = getattr(place, name, None)
        if callable(found) and not isinstance(found, type) and not any(found is other for other in seen):
            seen.append(found)
    return seen


def twin_of(func: Any) -> Any:
    """Function of torch for an operator of ATen like ``torch.ops.aten.add.Tensor``; None without a rule."""
    packet = getattr(func, "overloadpacket", func)
    if getattr(packet, "_qualified_op_name", "") != f"aten::{getattr(packet, '__name__', '')}":
        return None
    # Functions of C have the operator's arguments. Those of ``torch`` come before methods.
    found = (getattr(place, packet.__name__, None) for place in _OPERATORS)
    return next((each for each in found if each in RULES and isinstance(each, _OF_C)), None)


def rule(kind: str, *names: Any, doc: str = "", errors: str = "") -> Callable[[Handler], Handler]:
    """Decorator that enters a handler for functions: given ones, or all of torch's with given names.

    Parameters
    ----------
    kind, names
        Of :class:`Rule`; a name stands for all functions of torch that have it.
    doc
        The line of the page of all functions, if the handler's docstring is for several of them.
    errors
        ``"first"``: torch's errors for the whole shapes are raised before the handler runs, for rules that do
        not call torch's function with the user's arguments. ``"own"``: the handler calls
        ``raise_as_torch`` itself, once for a kind of input. Empty: torch's function on the block raises
        them, and only ranks with empty blocks need the check.
    """

    def enter(handler: Handler) -> Handler:
        for name in names:
            for function in functions_named(name) if isinstance(name, str) else (name,):
                # The name in autocast's lists: the one in ATen, or that of the Python function around it.
                known = [each for each in (getattr(function, "__name__", ""), name) if is_cast(each)]
                RULES[function] = Rule(kind, handler, doc, known[0] if known else "", errors)
        return handler

    return enter


@cache
def name_of(function: Any) -> str:
    """The name of a function in messages: ``torch.nn.functional.conv2d``, ``Tensor.add``."""
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

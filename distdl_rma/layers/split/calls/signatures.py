"""Arguments of calls under the names of torch's own signatures.

A Python function has a signature. A C function has a schema for every form of its call. Here the schemas
become one signature: the positional arguments of the longest form, then the names that only other forms have.
``tensors_in`` and ``mapped`` are for the tensors among arguments.

So a handler states the names that it needs, and gets them however the user passed them:

    x.sum(2, True)   x.sum(dim=2, keepdim=True)   x.sum(axis=2, keepdims=True)
        all become   dim=2, keepdim=True, dtype=None

Signatures are read from torch when a function is called first, and not written down here: a new version of
torch brings new arguments, and a list of ours would drop these silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from distdl_rma.layers.split.calls.table import name_of

# Names that torch also takes, as numpy does; and names for a first argument.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}
_FIRST = "input", "self", "x", "a", "x1"
# Arguments that torch takes, but does not publish.
_MORE: dict[Any, dict[str, Any]] = {
    **{pool: {"return_indices": False} for pool in (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)},
    **{nonzero: {"as_tuple": False} for nonzero in (torch.nonzero, torch.Tensor.nonzero)},
}
_schemas_of: Any = torch._C._jit_get_schemas_for_operator


class Signature(NamedTuple):
    """Arguments of a function."""

    first: str  # empty if the function takes any number of positional arguments first
    places: tuple[str, ...]  # names of the positional arguments behind the first
    most: int  # number of positional arguments
    defaults: dict[str, Any]  # of all arguments behind the first; None for one without a default


@cache
def signature_of(function: Any) -> Signature:
    """Arguments of a function, read from torch when it is called first."""
    parameters = _of_python(function)
    if parameters is None:
        parameters = _of_python(torch.overrides.get_testing_overrides().get(function))
    if parameters is None or inspect.ismethoddescriptor(function) or inspect.isbuiltin(function):
        parameters = _of_schemas(function) or parameters or []
    first, *places = [name for name, _, has_place in parameters if has_place] or [""]
    defaults = {name: default for name, default, _ in parameters if name != first}
    defaults.update(_MORE.get(function, {}))
    return Signature(first, tuple(places), 1 + len(places), defaults)


def _of_python(function: Any) -> list[tuple[str, Any, bool]] | None:
    # Name, default, and whether it is positional; None if the function takes any number of arguments.
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [
        (p.name, None if p.default is p.empty else p.default, p.kind is not p.KEYWORD_ONLY)
        for p in parameters
    ]


def _of_schemas(function: Any) -> list[tuple[str, Any, bool]]:
    forms = [
        schema.arguments
        for schema in _schemas_of(f"aten::{function.__name__}")
        # Without forms that write into a user's tensor or a list, and without forms of numbers or of names.
        if not any(each.is_out for each in schema.arguments)
        and any("Tensor" in str(each.type) for each in schema.arguments)
        and "Dimname" not in str(schema)
        and schema.returns
    ]
    places = max(([each for each in form if not each.kwarg_only] for form in forms), key=len, default=[])
    defaults: dict[str, Any] = {each.name: None for each in places}
    for each in (each for form in forms for each in form):
        if defaults.setdefault(each.name) is None and each.has_default_value():
            default = each.default_value
            # A tuple, since lists have no hash.
            defaults[each.name] = tuple(default) if isinstance(default, list) else default
    return [
        # Schemas say self, torch's functions say input.
        ("input" if name == "self" else name, default, at < len(places))
        for at, (name, default) in enumerate(defaults.items())
    ]


def named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call behind the first, by name; those that are not passed have torch's defaults.

    An argument that the function does not have raises ``TypeError``, as torch does; ``out=None`` counts as
    not passed.
    """
    _, places, most, defaults = signature_of(function)
    found = {**defaults, **dict(zip(places, args[1:], strict=False)), **kwargs}
    if args[most:]:
        # Torch takes the last one as a list or as separate arguments.
        found[places[-1]] = tuple(args[most - 1 :])
    for name in kwargs:
        if name not in defaults:
            return _renamed(function, found, defaults)
    return found


def _renamed(function: Any, found: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for name in [name for name in found if name not in defaults]:
        value, known = found.pop(name), _ALIASES.get(name, name)
        if known in defaults:
            found[known] = value
        elif name != "out" or value is not None:
            raise TypeError(f"{name_of(function)}() got an unexpected argument {name!r}")
    return found


def first_by_place(function: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that passes all of them by name; the first becomes positional, as rules expect."""
    first, rest = signature_of(function).first, dict(kwargs)
    name = next((name for name in (first, *_FIRST) if name in rest), None)
    return ((), rest) if name is None else ((rest.pop(name),), rest)


def tensors_in(*arguments: Any) -> list[torch.Tensor]:
    """All tensors among arguments, also within lists, tuples and dicts."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += tensors_in(*argument)
        elif isinstance(argument, dict):
            found += tensors_in(*argument.values())
    return found


def mapped(change: Any, argument: Any, note: Callable[[Any, Any], None] | None = None) -> Any:
    """Arguments with ``change`` applied to every tensor; ``note`` gets each list or dict, and the new one.

    Named tuples, such as the results of ``torch.sort``, keep their type.
    """
    if isinstance(argument, torch.Tensor):
        return change(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(mapped(change, one, note) for one in argument))
    found: Any = argument
    if isinstance(argument, (list, tuple)):
        found = type(argument)(mapped(change, one, note) for one in argument)
    elif isinstance(argument, dict):
        found = {key: mapped(change, one, note) for key, one in argument.items()}
    if note is not None and isinstance(argument, (list, dict)):
        note(argument, found)
    return found

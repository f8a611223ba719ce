"""Arguments of layers, read as torch reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import index as as_int
from typing import Any, TypeVar

from torch import nn

from distdl_rma.errors import ArgumentError
from distdl_rma.layers.core.callbacks import Callbacks

T = TypeVar("T")


class PlacedOptions(Callbacks, total=False):
    """What layers with parameters take by name alone, beside what torch's take."""

    placement: str | None
    weights: str | None
    name: str | None


def each_dim(
    kind: str, what: str, value: object, dims: int, read: Callable[[Any], T], wanted: str
) -> tuple[T, ...]:
    """One number per dimension from what torch accepts: one for all, or a tuple of ``dims``.

    ``ArgumentError`` if there is another number of them, or ``read`` refuses one by any error of a number.
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims
    try:
        if len(values) == dims:
            return tuple(read(v) for v in values)
    except (TypeError, ValueError):
        pass
    raise ArgumentError(f"{kind}: {what} is {wanted}, or {dims} of them; got {value!r}")


def per_dim(kind: str, what: str, value: object, dims: int, least: int) -> tuple[int, ...]:
    """One integer of at least ``least`` per dimension; as in torch, a tuple of one will do as well."""

    def read(number: Any) -> int:
        found = as_int(number)
        if found < least:
            raise ValueError
        return found

    given = tuple(value) * dims if isinstance(value, Sequence) and len(value) == 1 else value
    return each_dim(kind, what, given, dims, read, f"an integer of at least {least}")


def chosen_placement(kind: str, placement: str | None, weights: str | None, allowed: Sequence[str]) -> str:
    """Where a layer keeps its parameters: one of ``allowed``, the first one unless it is told.

    ``weights`` is another name of the argument ``placement``; both are None where they are not given.
    ``ArgumentError`` if it is another one, or the two differ.
    """
    if placement is not None and weights is not None and placement != weights:
        raise ArgumentError(
            f"{kind}: placement={placement!r} and weights={weights!r} mean the same; give one"
        )
    chosen = next((word for word in (placement, weights) if word is not None), allowed[0])
    if chosen not in allowed:
        raise ArgumentError(f"{kind}: placement is one of {tuple(allowed)}, got {chosen!r}")
    return chosen


def show_arguments_of(layer: type[nn.Module], twin: type[nn.Module], named: Iterable[str]) -> None:
    """Have ``help`` show what a constructor takes: P_x, the arguments of a torch layer, and some by name."""
    constructor, kinds = layer.__init__, inspect.Parameter
    first = [kinds(key, kinds.POSITIONAL_OR_KEYWORD) for key in ("self", "P_x")]
    torchs = inspect.signature(twin).parameters.values()
    last = [kinds(key, kinds.KEYWORD_ONLY, default=None) for key in named]

    @wraps(constructor)
    def shown(self: nn.Module, *arguments: Any, **options: Any) -> None:
        constructor(self, *arguments, **options)

    vars(shown)["__signature__"] = inspect.Signature([*first, *torchs, *last])
    type.__setattr__(layer, "__init__", shown)

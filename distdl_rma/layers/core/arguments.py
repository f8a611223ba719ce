"""Arguments of layers, read as torch reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import index as as_int
from typing import Any, TypeVar

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, UnsupportedError
from distdl_rma.layers.core.callbacks import Callbacks

T = TypeVar("T")


class LayerOptions(Callbacks, total=False):
    """Keyword arguments of every layer: its name in messages, and callbacks."""

    name: str | None


class PlacedOptions(LayerOptions, total=False):
    """Keyword-only arguments of layers with parameters, beside those of torch."""

    placement: str | None
    weights: str | None


def each_dim(
    kind: str, what: str, value: object, dims: int, read: Callable[[Any], T], wanted: str
) -> tuple[T, ...]:
    """One value per dimension from an argument of torch: one for all, or a sequence of ``dims``.

    ``ArgumentError`` if the sequence has another length, or ``read`` raises ``TypeError`` or ``ValueError``.
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims
    try:
        if len(values) == dims:
            return tuple(read(v) for v in values)
    except (TypeError, ValueError):
        pass
    raise ArgumentError(f"{kind}: {what} is {wanted}, or {dims} of them; got {value!r}")


def per_dim(kind: str, what: str, value: object, dims: int, least: int) -> tuple[int, ...]:
    """One integer of at least ``least`` per dimension; as in torch, a sequence of one is valid too."""

    def read(number: Any) -> int:
        found = as_int(number)
        if found < least:
            raise ValueError
        return found

    given = tuple(value) * dims if isinstance(value, Sequence) and len(value) == 1 else value
    return each_dim(kind, what, given, dims, read, f"an integer of at least {least}")


def chosen_placement(kind: str, placement: str | None, weights: str | None, allowed: Sequence[str]) -> str:
    """Placement of a layer's parameters: one of ``allowed``, by default the first.

    ``weights`` is another name of ``placement``. ``ArgumentError`` if the two differ, or are not allowed.
    """
    if placement is not None and weights is not None and placement != weights:
        raise ArgumentError(
            f"{kind}: placement={placement!r} and weights={weights!r} mean the same; give one"
        )
    chosen = next((word for word in (placement, weights) if word is not None), allowed[0])
    if chosen not in allowed:
        raise ArgumentError(f"{kind}: placement is one of {tuple(allowed)}, got {chosen!r}")
    return chosen


def check_device(kind: str, device: torch.device | str | None) -> None:
    """Raise ``UnsupportedError`` if a device is not the CPU; None is torch's default device."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type != "cpu":
        raise UnsupportedError(f"{kind}: device {found} is not supported, only the CPU is")


def show_arguments_of(layer: type[nn.Module], twin: type[nn.Module], named: Iterable[str]) -> None:
    """Give a constructor a signature for ``help``: P_x, the arguments of a torch layer, and keyword ones."""
    constructor, kinds = layer.__init__, inspect.Parameter
    first = [kinds(key, kinds.POSITIONAL_OR_KEYWORD) for key in ("self", "P_x")]
    torchs = inspect.signature(twin).parameters.values()
    last = [kinds(key, kinds.KEYWORD_ONLY, default=None) for key in named]

    @wraps(constructor)
    def shown(self: nn.Module, *arguments: Any, **options: Any) -> None:
        constructor(self, *arguments, **options)

    vars(shown)["__signature__"] = inspect.Signature([*first, *torchs, *last])
    type.__setattr__(layer, "__init__", shown)

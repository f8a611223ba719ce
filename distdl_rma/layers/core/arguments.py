"""Arguments of layers, read as torch reads them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int

from distdl_rma.errors import ArgumentError


def per_dim(kind: str, what: str, value: object, dims: int, least: int) -> tuple[int, ...]:
    """One integer per dimension from what torch accepts: an integer, or a tuple of one or ``dims``.

    Raises
    ------
    ArgumentError
        If it is something else, or smaller than ``least``; names the layer's kind and the argument.
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    try:
        numbers = tuple(as_int(v) for v in values)
    except TypeError:
        numbers = ()
    if len(numbers) == 1:
        numbers *= dims
    if len(numbers) != dims or min(numbers) < least:
        raise ArgumentError(
            f"{kind}: {what} is an integer of at least {least}, or {dims} of them; got {value!r}"
        )
    return numbers


def chosen_placement(kind: str, placement: str | None, weights: str | None, allowed: Sequence[str]) -> str:
    """Where a layer keeps its parameters: one of ``allowed``, the first one unless it is told.

    ``weights`` is another name of the argument ``placement``; both are None where they are not given.

    Raises
    ------
    ArgumentError
        If it is another one, or the two differ.
    """
    if placement is not None and weights is not None and placement != weights:
        raise ArgumentError(
            f"{kind}: placement={placement!r} and weights={weights!r} mean the same; give one"
        )
    chosen = next((word for word in (placement, weights) if word is not None), allowed[0])
    if chosen not in allowed:
        raise ArgumentError(f"{kind}: placement is one of {tuple(allowed)}, got {chosen!r}")
    return chosen

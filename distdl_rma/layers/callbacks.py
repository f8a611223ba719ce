"""What a layer is asked about its communication, and what its user may answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from torch import nn

from distdl_rma.errors import ConfigurationError

__all__ = ["Callbacks", "answer", "callbacks_among"]


class Callbacks(TypedDict, total=False):
    """Callbacks of the interface document; each may be given to a layer when it is built, and then wins.

    Notes
    -----
    Interface document, sections 3.1 and 4.1; requirements A9 to A13.
    """

    get_ranks_synch_weights: Callable[[], Sequence[int]]
    get_sizeof_gradients: Callable[[], int]
    get_ranks_synch_norm: Callable[[], Sequence[int]]
    get_sizeof_norm: Callable[[], int]
    get_sizeof_tensor: Callable[[], int]
    get_sizeof_input_tensor: Callable[[], int]
    get_sizeof_output_tensor: Callable[[], int]


def answer(module: nn.Module, who: str, callbacks: Mapping[str, Any]) -> None:
    """Have a module answer by the given callbacks instead of its own methods; local.

    Raises
    ------
    TypeError
        If one of them is not known.
    ConfigurationError
        If one of them cannot be called.
    """
    for name, callback in callbacks.items():
        if name not in Callbacks.__annotations__:
            raise TypeError(f"{who} got an unexpected keyword argument {name!r}")
        if not callable(callback):
            raise ConfigurationError(f"{who}: {name} is a function without arguments, got {callback!r}")
        setattr(module, name, callback)


def callbacks_among(options: dict[str, Any]) -> Callbacks:
    """Callbacks among keyword arguments, taken out of them."""
    found: Any = {name: options.pop(name) for name in Callbacks.__annotations__ if name in options}
    callbacks: Callbacks = found
    return callbacks

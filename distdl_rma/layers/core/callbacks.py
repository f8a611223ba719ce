"""What a layer is asked about its communication, and what its user may answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, TypedDict

from torch import nn

from distdl_rma.errors import ConfigurationError


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


def check_answers(module: nn.Module, who: str, truths: Mapping[str, Callable[[], object]]) -> None:
    """Ask the callbacks that the user of a module gave, and compare with what is true; local.

    Parameters
    ----------
    module
        The module.
    who
        For messages.
    truths
        Name to what holds: a number, or ranks in any order. Asked for what the user gave only.

    Raises
    ------
    ConfigurationError
        If an answer is another one, or none.
    """
    given = vars(module)
    for name in truths:
        if name not in given:
            continue
        try:
            said, true = _plain(given[name]()), _plain(truths[name]())
        except Exception as error:
            raise ConfigurationError(f"{who}: {name}() gives no such thing: {error!r}") from error
        if said != true:
            raise ConfigurationError(
                f"{who}: {name}() gave {said}, it is {true}; leave it out, or correct it"
            )


def _plain(said: Any) -> int | list[int]:
    return as_int(said) if hasattr(said, "__index__") else sorted(as_int(rank) for rank in said)


def callbacks_among(options: dict[str, Any]) -> Callbacks:
    """Callbacks among keyword arguments, taken out of them."""
    found: Any = {name: options.pop(name) for name in Callbacks.__annotations__ if name in options}
    callbacks: Callbacks = found
    return callbacks

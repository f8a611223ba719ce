"""Functions kept without a hold on what they belong to."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakMethod

F = TypeVar("F", bound=Callable[..., Any])


def weakly_bound(function: F) -> Callable[[], F]:
    """What returns a function again, which it keeps alive unless that is a method of an object.

    What a layer opens on the machine it also tells whom to ask: the layer. With a plain reference back, a
    layer that is dropped would wait for the cyclic collector, and with it the memory of its segment. Whoever
    calls the method must hold the object.
    """
    if not isinstance(function, MethodType):
        return lambda: function
    method, name = WeakMethod[Any](function), function.__qualname__

    def alive() -> F:
        found: F | None = method()
        if found is None:
            raise ReferenceError(f"{name} belonged to an object that is gone")
        return found

    return alive

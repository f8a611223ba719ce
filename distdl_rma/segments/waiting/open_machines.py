"""The open machines of this process: while this rank waits in one of them, the others go on as well."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class OpenMachine(Protocol):
    """What a process may have several of, each with peers that wait for its steps."""

    def advance_quietly(self) -> None:
        """Take the steps that can be taken at once; never blocks, nor raises what went wrong in them."""


# Replaced as a whole, so that who goes through it needs no lock: progress engines are other threads.
_open: tuple[weakref.ref[OpenMachine], ...] = ()
_changing = threading.Lock()


def register(one: OpenMachine) -> None:
    """Have a machine go on during every wait of this process; it is not kept alive for that."""
    global _open  # noqa: PLW0603
    with _changing:
        _open = (*(known for known in _open if known() is not None), weakref.ref(one))


def unregister(one: OpenMachine) -> None:
    """Undo ``register``; idempotent."""
    global _open  # noqa: PLW0603
    with _changing:
        _open = tuple(known for known in _open if known() not in (one, None))


def advance_other_machines(one: OpenMachine | None) -> None:
    """Have all machines but one take their steps; costs one comparison where there is only that one."""
    known = _open
    if len(known) > (one is not None):
        for reference in known:
            other = reference()
            if other is not None and other is not one:
                other.advance_quietly()

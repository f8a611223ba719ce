"""What people call layers: by their paths in the model, where ranks know them by kinds and numbers."""

from __future__ import annotations

import re
import weakref
from itertools import count
from typing import Protocol

# As ``new_name`` makes them, and copies of layers have them.
_NAME = re.compile(r"\b[A-Za-z_]\w*#\d+(?: \(copy \d+\))?")


class Labelled(Protocol):
    """What people call by another name than the ranks do."""

    @property
    def label(self) -> str:
        """Name for people."""


class Labels:
    """Names of the layers of one machine, and what to put in their place in text for people.

    Ranks match what they exchange by the names themselves: their models may be wrapped in other ways.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._owners: weakref.WeakValueDictionary[str, Labelled] = weakref.WeakValueDictionary()

    def new_name(self, kind: str) -> str:
        """Name for the next layer, the same on all ranks that build the same layers in order."""
        return f"{kind}#{next(self._numbers)}"

    def register(self, name: str, owner: Labelled) -> None:
        """Have a name from ``new_name``, or a copy of it, read as its owner says."""
        self._owners[name] = owner

    def readable(self, text: str) -> str:
        """Text in which layers are called by their labels."""
        return _NAME.sub(self._label_of, text)

    def make_readable(self, error: BaseException) -> None:
        """Have the text of an error call layers by their labels."""
        if error.args and isinstance(error.args[0], str):
            error.args = (self.readable(error.args[0]), *error.args[1:])

    def _label_of(self, found: re.Match[str]) -> str:
        owner = self._owners.get(found[0])
        return found[0] if owner is None else owner.label

"""Frames of Python that are the user's: whose line an error, a warning or the site of a call names.

The stack of a call has the user's program below, then torch's and this package's functions, which call each
other in turn. The user's line is that of the innermost frame outside of both:

    train.py:31          loss = criterion(model(x), y)     <- this one
    torch/nn/modules     Module.__call__, Conv2d.forward
    distdl_rma/layers    the rule of conv2d

Which folder of this package counts as its own depends on the question, see ``split/calls/site.py``.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_LAYERS = Path(__file__).parents[1]


class LibraryFiles(dict[str, bool]):
    """For each file: whether its code is torch's, of contextlib, or in some places of ``layers``.

    A dict, since sites look files up at every call of a function.
    """

    def __init__(self, *paths: str | Path) -> None:
        super().__init__()
        self._paths = f"{Path(torch.__file__).parent}/", *[f"{_LAYERS / path}" for path in paths]

    def __missing__(self, file: str) -> bool:
        """Whether a file that is new is one of these."""
        found = self[file] = file.startswith(self._paths) or file == contextlib.__file__
        return found


_OF_LAYERS = LibraryFiles("")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn once, with the user's line that leads here."""
    if (frame := _user_frame()) is not None:
        known = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=known)


def user_line() -> str:
    """File and line of the user's program that lead here; empty if there are none."""
    frame = _user_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _OF_LAYERS[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame

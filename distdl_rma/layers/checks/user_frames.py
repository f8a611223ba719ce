"""Frames of Python that are the user's: whose line an error, a warning or the site of a call names.

The stack of a call has the user's program below, then torch's and this package's functions, which call each
other in turn. The user's line is that of the innermost frame outside of both:

    train.py:31          loss = criterion(model(x), y)     <- this one
    torch/nn/modules     Module.__call__, Conv2d.forward
    distdl_rma/layers    the rule of conv2d
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_LIBRARY_PATHS = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"


class _Inner(dict[str, bool]):
    # For each file: whether its code is torch's, of this package, or of contextlib.
    def __missing__(self, file: str) -> bool:
        found = self[file] = file.startswith(_LIBRARY_PATHS) or file == contextlib.__file__
        return found


INNER = _Inner()


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn once, with the user's line that leads here."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and INNER[frame.f_code.co_filename]:
        frame = frame.f_back
    if frame is not None:
        known = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=known)

"""``python -m distdl_rma predict``: predict for a file, with a model that a function makes."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

from distdl_rma.errors import ArgumentError, DistdlError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns the model, or a model",
    )
    parser.add_argument("--in", dest="source", required=True, metavar="FILE", help="source, as of open_array")
    parser.add_argument(
        "--out", metavar="FILE", help="new .npy, .h5, .hdf5 or .zarr; without it, the plan only"
    )
    parser.add_argument("--memory", default="8GiB", metavar="SIZE", help="for slabs and what waits (8GiB)")
    parser.add_argument("--scratch", metavar="DIR", help="folder on a disk for what does not fit")
    parser.add_argument("--grid", metavar="N", help="blocks of the last dimensions, such as 8x1x1")
    parser.add_argument(
        "--post", metavar="MODULE:FUNCTION", help="function of the result, before it is written"
    )
    parser.add_argument("--quiet", action="store_true", help="without plan and progress bar")


def run(chosen: argparse.Namespace) -> int:
    """Predict, or print the plan; the exit status. Collective over the ranks of the job."""
    # Help needs neither torch nor MPI.
    from torch import nn

    from distdl_rma.machine import launched
    from distdl_rma.out_of_core.predict import plan_prediction, predict

    try:
        found = _named(chosen.model)
        model = found if isinstance(found, nn.Module) else found()
        post: Callable[[Any], Any] | None = None if chosen.post is None else _named(chosen.post)
        options: dict[str, Any] = {
            "memory": chosen.memory,
            "scratch": chosen.scratch,
            "grid": chosen.grid,
            "post": post,
        }
        if chosen.out is None:
            plan = plan_prediction(model, chosen.source, **options)
            sys.stdout.write("" if launched()[0] else f"{plan}\n")
        else:
            predict(model, chosen.source, chosen.out, progress=not chosen.quiet, **options)
    except DistdlError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _named(text: str) -> Any:
    # The object that MODULE:NAME means; modules of the present folder are found.
    module, _, name = text.partition(":")
    if not module or not name:
        raise ArgumentError(f"predict: {text!r} is not of the form module:function")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ArgumentError(
            f"predict: there is no module {error.name!r}; start the command in its folder, or set PYTHONPATH"
        ) from None
    except AttributeError:
        raise ArgumentError(f"predict: module {module!r} has no {name!r}") from None

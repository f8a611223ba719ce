r"""``distdl_rma predict``: predict for a file, with a model that a function makes.

::

    mpiexec -n 2 distdl_rma predict nets:unet --in scan.npy --out classes.npy \
        --memory 4GiB

Errors of the library are one line, from the first rank. Where code of the user raises, its traceback stands
above.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distdl_rma.errors import ArgumentError, DistdlError, told

if TYPE_CHECKING:
    from torch import nn

    from distdl_rma.jobs.out_of_core.bundle import Bundle
    from distdl_rma.jobs.out_of_core.nnunet import TrainedFolder


# Options that take a text: what help calls that, and what it means.
_OPTIONS = {
    "--out": ("FILE", "new .npy, .h5, .zarr or .ome.zarr; without it, the plan only"),
    "--checkpoint": ("RUN", "weights: a folder of Checkpoints, or a state dict (.pt, .pth, .safetensors)"),
    "--bundle": ("DIR", "a bundle of MONAI, in place of a function"),
    "--nnunet": ("DIR", "a folder that nnU-Net has trained, in place of these"),
    "--fold": ("N", "of --nnunet: 0, several as 0,1,2, or all (all numbers)"),
    "--device": ("TYPE", "that computes, such as cuda: one for each rank of a host"),
    "--scratch": ("DIR", "folder on a disk for what does not fit"),
    "--grid": ("N", "blocks of the last dimensions, such as 8x1x1"),
    "--post": ("MODULE:FUNCTION", "function of the result, before it is written"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model", nargs="?", metavar="MODULE:FUNCTION", help="a function that returns the model, or a model"
    )
    parser.add_argument(
        "--in", dest="source", required=True, metavar="FILE", help="source, as of open_array: also a URL"
    )
    for flag, (metavar, text) in _OPTIONS.items():
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument("--memory", default="8GiB", metavar="SIZE", help="for slabs and what waits (8GiB)")
    parser.add_argument("--chunks", type=extents, metavar="N", help="of a new .zarr: 64x64x64")
    parser.add_argument("--raw", action="store_true", help="without the last steps of a bundle or of nnU-Net")
    parser.add_argument("--quiet", action="store_true", help="without plan and progress bar")


def extents(text: str) -> tuple[int, ...]:
    """Extents such as 64x64x64."""
    return tuple(map(int, text.split("x")))


def run(chosen: argparse.Namespace) -> int:
    """Predict, or print the plan; the exit status. Collective over the ranks of the job."""
    # Help needs neither torch nor MPI.
    from distdl_rma.jobs.checkpoints.weights import load_weights
    from distdl_rma.jobs.out_of_core.predict import plan_prediction, predict
    from distdl_rma.jobs.out_of_core.processes import Processes

    processes = Processes(None)
    try:
        with processes.together():
            of_others = _of_others(chosen)
            model, post = (of_others.model, of_others.post) if of_others else (_model(chosen.model), None)
            if chosen.checkpoint is not None:
                load_weights(chosen.checkpoint, model)
            if chosen.device is not None:
                _move(model, chosen.device, processes.place)
            if chosen.post is not None and not callable(post := _named(chosen.post)):
                raise ArgumentError(f"predict: {chosen.post} is a {type(post).__name__!r}, and no function")
        source = chosen.source
        if of_others is not None:
            with _code_of_user(chosen.bundle or chosen.nnunet):
                source = of_others.measured(processes)
        options = {name: getattr(chosen, name) for name in ("memory", "scratch", "grid")} | {"post": post}
        if chosen.out is not None:
            predict(model, source, chosen.out, progress=not chosen.quiet, chunks=chosen.chunks, **options)
        elif processes.first:
            sys.stdout.write(f"{plan_prediction(model, source, **options)}\n")
    except DistdlError as error:
        # All ranks have one.
        if processes.first:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _of_others(chosen: argparse.Namespace) -> Bundle | TrainedFolder | None:
    # What another program has trained, opened for the file; None for a model that a function makes.
    from distdl_rma.jobs.out_of_core.bundle import Bundle
    from distdl_rma.jobs.out_of_core.nnunet import TrainedFolder

    if sum(each is not None for each in (chosen.model, chosen.bundle, chosen.nnunet)) != 1:
        raise ArgumentError(
            "predict: name a model, as module:function, or a bundle, by --bundle, or a folder of nnU-Net, by"
            " --nnunet"
        )
    if (chosen.fold and chosen.nnunet is None) or (chosen.raw and chosen.model is not None):
        raise ArgumentError("predict: --fold is of --nnunet, --raw of --nnunet and --bundle")
    if chosen.model is not None:
        return None
    with _code_of_user(chosen.bundle or chosen.nnunet):
        if chosen.bundle is not None:
            return Bundle(chosen.bundle, chosen.source, chosen.raw)
        return TrainedFolder(chosen.nnunet, chosen.source, chosen.raw, chosen.fold)


def _model(text: str) -> nn.Module:
    # The model that MODULE:NAME means, or makes.
    from torch import nn

    found = _named(text)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ArgumentError(
            f"predict: {text} is a {type(found).__name__!r}; name a model, or a function without arguments"
            " that returns one"
        )
    with _code_of_user(text):
        made = found()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"predict: {text} returns a {type(made).__name__!r}; it returns the model, a torch.nn.Module"
        )
    return made


def _move(model: nn.Module, text: str, place: int) -> None:
    # To a device. Without its number, ranks of a host have one each, as far as there are so many.
    import torch

    with told(ArgumentError, f"predict: --device {text}"):
        device = torch.device(text)
        if ":" not in text and text != "cpu":
            count = torch.get_device_module(device).device_count()
            device = torch.device(device.type, place % max(1, count))
        model.to(device)


def _named(text: str) -> Any:
    # The object that MODULE:NAME means; modules of the present folder are found.
    module, _, name = text.partition(":")
    if not name or not module.replace(".", "").isidentifier() or module.startswith("."):
        raise ArgumentError(f"predict: {text!r} is not of the form module:function, without a path and .py")
    with _code_of_user(f"the module {module}"):
        if find_spec(package := module.partition(".")[0]) is None:
            raise ArgumentError(
                f"predict: there is no module {package!r}; start the command in its folder, or set PYTHONPATH"
            )
        found = import_module(module)
    if not hasattr(found, name):
        raise ArgumentError(f"predict: module {module!r} has no {name!r}")
    return getattr(found, name)


@contextmanager
def _code_of_user(what: str) -> Iterator[None]:
    # Context of code of the user. Its traceback is for the user, beside the error that all ranks raise.
    try:
        yield
    except DistdlError:
        raise
    except Exception as error:
        sys.stderr.write("".join(traceback.format_exception(error)))
        raise ArgumentError(f"predict: {what} raises {type(error).__name__}: {error}") from error

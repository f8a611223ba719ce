"""Weights of a model from files: of a run of ``Checkpoints``, or a state dict that another program has saved.

A state dict is taken as the item of a checkpoint that a model is, so that keys, shapes and types are compared
with those of the model, and refused in the same words, before a parameter is changed. Files of weights come
from strangers: nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import CheckpointError
from distdl_rma.jobs.checkpoints.files import named
from distdl_rma.jobs.checkpoints.form import dtype_name
from distdl_rma.jobs.checkpoints.load import load_checkpoint
from distdl_rma.jobs.checkpoints.objects import Objects
from distdl_rma.layers.sources.remote import check_found, needed

_SAFETENSORS, _PICKLES = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")
# What programs call the state dict of the model, in a file that has more.
_ENTRIES = ("state_dict", "model_state_dict", "network_weights", "model", "network")
# Numbers of numpy, which some files have beside tensors: none of these runs code. One has two names.
_SCALAR = np.float64(0).__reduce__()[0]
_NUMBERS: list[Any] = [
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}),
]


def load_weights(path: str | os.PathLike[str], into: nn.Module) -> None:
    """Load the weights of a file, or of the newest checkpoint of a folder, into a model; local, blocking.

    Raises
    ------
    DataError
        If there is no such file.
    CheckpointError
        If a folder has no checkpoint, a file no state dict, or the keys are not those of the model.
    ShapeError
        If shapes or types of tensors differ.
    """
    if (suffix := Path(path).suffix.lower()) not in (_SAFETENSORS, *_PICKLES):
        load_checkpoint(path, into)
        return
    check_found(os.fspath(path))
    unpickle = partial(torch.load, map_location="cpu", weights_only=True)
    load = needed("safetensors.torch").load_file if suffix == _SAFETENSORS else unpickle
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            found: dict[str, Any] = dict(load(path))
    except Exception as error:
        # Of torch's many lines the one that names what it does not unpickle, without advice to do so.
        lines = str(error).splitlines() or [""]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0]).partition(". ")[0]
        raise CheckpointError(
            f"{path}: is no file of tensors and plain values: {type(error).__name__}: {reason}"
        ) from error
    if not _is_state(found):
        found = next((found[entry] for entry in _ENTRIES if _is_state(found.get(entry))), {})
    if not found:
        raise CheckpointError(f"{path}: has no state dict of a model, alone or as one of {_ENTRIES}")
    mine = into.state_dict()
    # Models within a wrapper of torch for several GPUs. Half floats become the model's without loss.
    tensors = {name if name in mine else name.removeprefix("module."): x for name, x in found.items()}
    for name, x in tensors.items():
        if name in mine and torch.promote_types(x.dtype, mine[name].dtype) == mine[name].dtype:
            tensors[name] = x.to(mine[name].dtype)
    forms = {"model": {"kind": "module", "state": {name: {"tensor": name} for name in tensors}}}
    objects = Objects({"model": into}, "model", lambda _: {})
    with named(f"{path}"):
        objects.wanted(forms, {name: (dtype_name(x.dtype), tuple(x.shape)) for name, x in tensors.items()})
        objects.load(forms, tensors)


def _is_state(found: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(x, torch.Tensor) for x in found.values())

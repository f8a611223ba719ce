"""Checkpoints without ranks: loaded by one process, which needs no MPI.

This is ``Checkpoints.restore`` for one rank, without anything that ranks agree on. It is a file of its own
since ``job.py`` imports MPI, and the usual place of a finished model is a machine that has none: a notebook,
a web server. The layers of this library import MPI too, so that the function looks whether somebody else has
loaded them before it asks for the cuts of a distributed model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from torch import nn

from distdl_rma.errors import CheckpointError
from distdl_rma.jobs.checkpoints import files
from distdl_rma.jobs.checkpoints.objects import Cuts, Objects


def load_checkpoint(
    folder: str | os.PathLike[str], into: nn.Module | MutableMapping[str, Any], *, name: str | None = None
) -> int:
    """Load a checkpoint into a model, or a state of several objects; returns its step.

    Local and blocking; needs no MPI. If ranks call it, each one reads what it needs. All tensors are read
    before an object is changed, and those that are read whole are checked: of a tensor that ranks hold in
    parts, :meth:`Checkpoints.restore` checks every byte. Generators stay as they are.

    Parameters
    ----------
    folder
        A directory such as ``run/step-120``, or the folder of all, for the newest complete one.
    into
        A module, or a dict of names and objects as for :meth:`Checkpoints.save`.
    name
        Entry of the checkpoint that a module takes, such as ``"ema"``; the model if None.

    Raises
    ------
    CheckpointError
        If there is none, or it is damaged, of a newer version or of another model.
    ShapeError
        If shapes or dtypes of tensors differ.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 4, 3), {"H": -1})
    >>> with Checkpoints("run") as checkpoints:
    ...     checkpoints.save({"model": model}, step=20).name
    'step-20'
    >>> load_checkpoint("run", nn.Conv2d(1, 4, 3))  # also in a process alone, without MPI
    20
    """
    path = Path(folder).absolute()
    with files.explained("reading", path, "may it be read?"):
        if not (path / files.MANIFEST).is_file():
            found = files.complete(path)
            if not found:
                within = [each.name for each in path.glob("*") if files.complete(each)]
                advice = f"; there are some in {', '.join(sorted(within))}" if within else ""
                raise CheckpointError(
                    f"load_checkpoint: {path} is no checkpoint, nor has it a complete one{advice}"
                )
            path = found[0]
    saved = files.opened(path)
    body = saved.body
    cuts: Cuts = lambda _module: {}  # noqa: E731
    if "distdl_rma.layers.partitioned.core.layer" in sys.modules:
        # Otherwise no layer of a model can be distributed, and MPI is not needed.
        from distdl_rma.layers.state import scattered as cuts
    state = {name or body["main"] or "model": into} if isinstance(into, nn.Module) else into
    with files.named(f"checkpoint {saved.path}"):
        objects = Objects(state, body["main"], cuts)
        items = saved.items(objects.wanted(body["forms"], saved.kinds()))
        tensors, parts = {item.name: objects.blank(item) for item in items}, list(map(objects.part, items))
    pieces = files.cut_out(tensors, ((part, 0, part.box.volume) for part in parts))
    with files.explained("reading", saved.data, "may it be read?"):
        sums = files.read(saved.data, pieces)
    # The checksum of a tensor is that of all its bytes: a part that this rank alone has read proves nothing.
    saved.check_sums({p.item.name: sums[p.item.name] for p in parts if p.nbytes == p.item.nbytes})
    with files.named(f"checkpoint {saved.path}"):
        objects.load(body["forms"], tensors)
    return int(body["step"])

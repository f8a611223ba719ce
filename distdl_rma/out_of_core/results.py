"""Where a prediction is written, and what a later process needs to go on with it."""

from __future__ import annotations

import json
import os
import shutil
import time
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from distdl_rma.data.sinks import ArraySink, array_of_one
from distdl_rma.dtypes import NUMPY, flat_bytes
from distdl_rma.errors import DataError, ShapeError, UnsupportedError
from distdl_rma.out_of_core.plan import Plan
from distdl_rma.segments.buffered_channel import Address, Mailbox, Message
from distdl_rma.sources.reading import label

Slices = tuple[slice, ...]
# Saving the messages takes a tenth of the time at most, where it takes longer than so many seconds.
_SAVING_SHARE, _QUICK_SECONDS = 0.1, 0.2
_STATE = "state.json"


def key_of(plan: Plan, model: nn.Module, source: Any) -> str:
    """Hash of what determines a prediction, but for the values of the source; local."""
    found = blake2b(digest_size=16)
    facts: list[Any] = [plan.source, plan.result, str(plan.dtype), plan.grid, label(source), repr(model)]
    if (path := getattr(source, "path", None)) and Path(path).is_file():
        at = Path(path).stat()
        facts += [at.st_size, at.st_mtime_ns]
    found.update(repr(facts).encode())
    for name, x in model.state_dict().items():
        found.update(f"{name} {tuple(x.shape)}".encode())
        if isinstance(x, torch.Tensor):
            found.update(flat_bytes(x).numpy().data)
    return found.hexdigest()


class Results:
    """The target of a prediction, as a context: a new tensor, a file, or a sink of the user.

    A file is complete or not there. Until then it has a folder ``path.progress`` beside it, with the number
    of slabs that were written and, where slabs end one after the other, the messages for the next slab. A
    context that ends by an error leaves both, and one with the same ``key`` goes on: ``sample`` and ``slab``
    are then the first ones to compute, and ``mailbox`` has the messages for it; ``written`` slabs of the
    sample need not be written.
    """

    def __init__(self, sink: Any, plan: Plan, key: str) -> None:
        self._plan, self._key = plan, key
        self.sample = self.slab = self.written = 0
        self.mailbox = Mailbox()
        self.tensor: torch.Tensor | None = None
        self._file: ArraySink | None = None
        self._sink: Any = sink
        self._saved, self._saving = time.monotonic(), 0.0
        if sink is None:
            self.tensor = torch.zeros(plan.result, dtype=plan.dtype)
        elif isinstance(sink, (str, os.PathLike)):
            self._sink = self._file = array_of_one(sink, plan.result, plan.dtype)
            self._folder = Path(f"{self._file.path}.progress")
        else:
            self._check(sink)

    def __enter__(self) -> Self:
        if self._file is not None and not self._resumed(self._file):
            self._file.__enter__()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            self._write_state(0, 0, "")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if error is not None and self.sample + self.written > 0:
            self._file.leave()
            return
        self._file.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, box: Slices, y: torch.Tensor) -> None:
        """Write a box of the result."""
        if self.tensor is not None:
            self.tensor[box] = y
            return
        try:
            self._sink[box] = y if isinstance(self._sink, torch.Tensor) else y.numpy()
        except OSError as error:
            raise DataError(f"predict: {label(self._sink)}: {error.strerror or error}") from error

    def ended(self, sample: int, slabs: int, in_order: bool) -> None:
        """Note that the first ``slabs`` of a sample are written.

        ``in_order`` says whether later ones have not begun, so that the messages are all that they need.
        """
        self.sample, self.written = sample, slabs
        if self._file is None:
            return
        last = slabs == self._plan.slabs
        now = time.monotonic()
        slow = self._saving > _QUICK_SECONDS
        if slow and not last and now - self._saved < self._saving / _SAVING_SHARE:
            return
        name = ""
        if in_order and not last:
            name = f"messages-{sample}-{slabs}.npz"
            self._write_messages(name)
        if in_order or not last or self._plan.waits:
            self._write_state(*((sample + 1, 0) if last else (sample, slabs)), name)
        self._saved = time.monotonic()
        self._saving = self._saved - now

    def _check(self, sink: Any) -> None:
        shape, dtype = tuple(getattr(sink, "shape", ())), getattr(sink, "dtype", None)
        if not hasattr(sink, "__setitem__") or shape != self._plan.result:
            raise ShapeError(
                f"predict: the result has shape {self._plan.result}, {label(sink)} {shape}; a sink is a path,"
                " or takes sink[box] = array"
            )
        if self._plan.dtype not in NUMPY:
            raise UnsupportedError(
                f"predict: numpy has no elements of {self._plan.dtype}; convert them by post="
            )
        wanted = NUMPY[self._plan.dtype]
        found = (
            NUMPY.get(dtype)
            if isinstance(dtype, torch.dtype)
            else np.dtype(getattr(dtype, "numpy_dtype", dtype))
        )
        if found != wanted:
            raise ShapeError(
                f"predict: {label(sink)} has elements of {found}, the result of {wanted}; convert it by post="
            )

    def _resumed(self, file: ArraySink) -> bool:
        # Whether an earlier process has begun the same; goes on with that.
        try:
            state = json.loads((self._folder / _STATE).read_text())
            if state["key"] != self._key or not file.part.exists() or Path(file.path).exists():
                return False
            if state["messages"]:
                self._read_messages(state["messages"])
                self.slab = self.mailbox.first = state["slabs"]
            self.sample, self.written = state["sample"], state["slabs"]
            file.reopen()
        except (OSError, ValueError, KeyError):
            return False
        return True

    def _write_state(self, sample: int, slabs: int, messages: str) -> None:
        state = {"key": self._key, "sample": sample, "slabs": slabs, "messages": messages}
        new = self._folder / f"{_STATE}.new"
        new.write_text(json.dumps(state))
        new.replace(self._folder / _STATE)
        for old in self._folder.glob("messages-*.npz"):
            if old.name != messages:
                old.unlink()

    def _write_messages(self, name: str) -> None:
        arrays: dict[str, Any] = {}
        kinds: list[Any] = []
        for address, queue in self.mailbox.messages.items():
            for message in queue:
                kinds.append([*address, list(message.kind), len(message.pieces)])
                arrays |= {str(len(arrays) + at): piece for at, piece in enumerate(message.pieces)}
        text = np.frombuffer(json.dumps(kinds).encode(), np.uint8)
        with (self._folder / f"{name}.new").open("wb") as file:
            np.savez(file, kinds=text, **arrays)
        (self._folder / f"{name}.new").replace(self._folder / name)

    def _read_messages(self, name: str) -> None:
        with np.load(self._folder / name, allow_pickle=False) as found:
            at = 0
            for *address, kind, count in json.loads(bytes(found["kinds"])):
                pieces = [found[str(at + n)] for n in range(count)]
                self.mailbox.put(Address(*address), Message(pieces, tuple(kind)))
                at += count

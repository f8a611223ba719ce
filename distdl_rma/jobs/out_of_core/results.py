"""Where a prediction is written, and what a later process needs to go on with it.

A sink that is a path is three things while a prediction runs; a killed process leaves the last two::

    scan.npy                      not there: a result is complete, or absent
    scan.npy.part                 what is written so far
    scan.npy.progress/
        state.json                how far, and of which prediction
        0-1-2.messages ...        what slabs that are left need of those that have ended (``ResumeLog``)

The state is three numbers, (sample, written, first): this sample is being written, ``written`` of its slabs
are there, and a later process computes from slab ``first`` on. Usually both are equal. ``first`` is smaller
where messages were left out because of a slow disk, and 0 where all slabs wait for each other: these are
computed again, without writing again what is written. A state is replaced as a whole, after the blocks that
it counts were written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, DataError, ShapeError, told
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.jobs.data.sinks import ArraySink, aligned, numpy_dtype
from distdl_rma.jobs.out_of_core.inference import device_of
from distdl_rma.jobs.out_of_core.plan import Plan
from distdl_rma.jobs.out_of_core.resume_log import ResumeLog
from distdl_rma.layers.dtypes import as_numbers, flat_bytes
from distdl_rma.layers.sources.dimensions import Dimensions, known, of_image
from distdl_rma.layers.sources.hdf5 import hdf5_lock
from distdl_rma.layers.sources.reading import Slices, label
from distdl_rma.layers.sources.zarr_nodes import store_of
from distdl_rma.segments.mailbox import Address, Message

_STATE = "state.json"
# What sources may say of each of their axes, and what is said of channels of the result.
_OF_AXES: dict[str, Any] = {"axes": "c", "spacing": 1.0, "units": None, "origin": 0.0}
# Names of the last dimensions in an image of OME-Zarr, where the source has none that it takes.
_SPACE = "zyx"


def digest_of(model: nn.Module) -> str:
    """Hash of a model, its modules, parameters and buffers, and of the autocast that it runs in; local.

    Code of modules is not part of it, but their ``repr``, which has their options.
    """
    kind = device_of(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ""
    found = blake2b(f"{model!r}{autocast}".encode(), digest_size=16)
    for name, x in model.state_dict().items():
        found.update(f"{name} {tuple(x.shape) if isinstance(x, torch.Tensor) else x}".encode())
        if isinstance(x, torch.Tensor):
            found.update(flat_bytes(x).cpu().numpy().data)
    return found.hexdigest()


def key_of(plan: Plan, digest: str, source: Any) -> str:
    """Hash of what determines a prediction, but for the values of the source; local.

    Of a file, size and time of its last change stand for its values, and of one of a server what that says.
    """
    facts: list[Any] = [plan.source, plan.result, str(plan.dtype), plan.splits, label(source), digest]
    # What is done to what is read.
    facts += getattr(source, "facts", ())
    if (path := getattr(source, "path", None)) is not None:
        facts += [getattr(source, "version", None), *_changes_of(Path(store_of(os.fspath(path))[0]))]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _changes_of(path: Path) -> list[int]:
    # Of a folder, whose chunks are files: when a folder in it has got another file for the last time.
    if path.is_dir():
        return [max(Path(home).stat().st_mtime_ns for home, *_ in os.walk(path))]
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else []


def made_as(plan: Plan, source: Any, sink: Any, chunks: Sequence[int] | None) -> dict[str, Any]:
    """Keywords that a new file for the result gets: its chunks, and what the source says of its axes; local.

    Chunks that are not given for the first dimensions are 1 there. A file of numpy has no place for axes.
    """
    made: dict[str, Any] = {}
    dims = len(plan.result)
    if chunks is not None:
        if not isinstance(chunks, (tuple, list)):
            raise ArgumentError(
                f"predict: chunks= has an extent for each dimension, such as (64, 64), got {chunks!r}"
            )
        made["chunks"] = (*(1 for _ in range(dims - len(chunks))), *chunks)
    if isinstance(sink, (str, os.PathLike)) and not os.fspath(sink).lower().endswith(".npy"):
        found = _dimensions(plan, source, os.fspath(sink).lower().endswith(".ome.zarr"))
        made |= {name: values for name, values in found._asdict().items() if values is not None}
    return made


def _dimensions(plan: Plan, source: Any, is_image: bool) -> Dimensions:
    # Samples and space are those of the source, if they are as large; channels are other ones. What does not
    # fit is left out: a prediction does not fail by the names of axes.
    dims, spatial, samples = len(plan.result), plan.form.spatial, int(plan.form.has_batch)
    channels, said = dims - spatial - samples, dict[str, Any]()
    if channels in (0, 1) and plan.result[-spatial:] == plan.source[-spatial:]:
        for name, of_channels in _OF_AXES.items():
            if (values := getattr(source, name, None)) is not None:
                said[name] = (*values[:samples], *[of_channels] * channels, *values[-spatial:])
    found = known(dims, **said)
    if is_image:
        usual = (*"t" * samples, *"c" * channels, *_SPACE[-spatial:])
        for axes in (found.axes or usual, usual):
            with suppress(ArgumentError):
                return of_image(found._replace(axes=axes), dims)
    return found


def of_disk(what: object) -> AbstractContextManager[object]:
    """Context in which an error of the system is a ``DataError`` that names ``what`` is read or written."""
    return told(DataError, f"predict: {what}", of=OSError)


@dataclass(frozen=True)
class Begin:
    """Where a prediction begins: the first ``sample`` and ``slab`` to compute.

    ``messages`` are those of earlier slabs for this one and later ones; ``written`` slabs of the sample need
    not be written. ``keeps`` says whether messages are kept for a process that goes on.
    """

    sample: int = 0
    slab: int = 0
    written: int = 0
    messages: tuple[tuple[Address, Message], ...] = ()
    keeps: bool = False

    def of(self, sample: int) -> Begin:
        """Where a sample begins."""
        return self if sample == self.sample else Begin(sample, keeps=self.keeps)


@dataclass(frozen=True)
class Place:
    """The part of a file's space that a network gets: ``extents`` from ``begin`` on, which may reach out.

    Only what is in ``inner`` is read, and 0 is around it, as behind the steps of a source. Only there the
    result is written, into a file of the ``whole`` space that has 0 elsewhere::

        file       0 ...................... whole
        inner               [--------)
        part             begin ......... begin + extents
    """

    begin: tuple[int, ...]
    extents: tuple[int, ...]
    inner: Slices
    whole: tuple[int, ...]

    def of(self, box: Slices) -> tuple[Slices, Slices]:
        """What is in ``inner`` of a box of the part: where it lies in the file, and in the box."""
        there, here = list[slice](), list[slice]()
        for each, begin, inner in zip(box, self.begin, self.inner, strict=True):
            low, high = each.start + begin, each.stop + begin
            start = min(max(low, inner.start), high)
            there.append(slice(start, max(start, min(high, inner.stop))))
            here.append(slice(start - low, there[-1].stop - low))
        return tuple(there), tuple(here)


class Results:
    """The target of a prediction, as a context: a tensor that is returned, a file, or a sink of the user.

    A file is complete or not there. Until then it has a folder ``path.progress`` beside it, with the number
    of slabs that were written and, where slabs end one after the other, the messages for later slabs. A
    context that ends by an error leaves both, and one with the same ``key`` goes on, from ``begin``. A new
    file is ``made`` with these keywords. If the source is a part of a file, by its ``place``, the result is
    that part of a larger one.

    The first process enters it first, which makes the file, then the others; they leave it before the first
    one does. Each writes its own boxes if all see the same file (``seen``), else the first one writes all. No
    two processes write one chunk, since all boxes end where chunks end (``aligned``).
    """

    def __init__(
        self, sink: Any, plan: Plan, key: str, made: Mapping[str, Any], first: bool, place: Place | None
    ) -> None:
        self._plan, self._key, self.begin = plan, key, Begin()
        self._place, self._shape = place, plan.result
        if place is not None:
            leading, space = plan.result[: -len(place.whole)], plan.result[-len(place.whole) :]
            if space != place.extents:
                raise ShapeError(
                    f"predict: the result has {space}, the source {place.extents}: let post= keep them"
                )
            self._shape = (*leading, *place.whole)
        self._first = first
        #: Whether this process writes its own boxes.
        self.writes = first
        self._file: ArraySink | None = None
        self._sink: Any = sink
        # The last state that was noted: sample, slabs that are written, and where a process would go on.
        self._state = 0, 0, 0
        if isinstance(sink, (str, os.PathLike)):
            self._sink = self._file = ArraySink(sink, self._shape, plan.dtype, plan.chunks, **made)
            # Boxes, and messages of their rests, depend on the chunks.
            self._key += str(self._file.chunks)
            self._folder = Path(f"{self._file.path}.progress")
            self._log = ResumeLog(self._folder)
        elif "chunks" in made:
            raise ArgumentError("predict: chunks= are of a new file, and the sink is no path")
        elif first:
            self._check(sink)

    def __enter__(self) -> Self:
        if not self._first or self._file is None or self._resumed(self._file):
            return self
        # Nobody shall take another file for that of an older state.
        with of_disk(self._folder):
            (self._folder / _STATE).unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
        with ExitStack() as on_error:
            on_error.callback(shutil.rmtree, self._folder, ignore_errors=True)
            on_error.enter_context(self._file)
            with of_disk(self._folder):
                self._folder.mkdir()
                self._note(0, 0, 0)
            on_error.pop_all()
        self.begin = Begin(keeps=self._keeps)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is None:
            return
        if not self._first and error is None and self.writes:
            with of_disk(label(self._sink)):
                self._file.flush()
        if not self._first or (error is not None and self._state > (0, 0, 0)):
            self._file.leave()
            return
        self._file.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def seen(self) -> list[int]:
        """What tells the file from others with its path, as on the disk of another host; equal if none."""
        with suppress(OSError):
            if self._file is not None:
                found = self._file.part.stat()
                return [found.st_ino, found.st_ctime_ns]
        return []

    def join(self, hosts: int) -> None:
        """Write the boxes of this process from now on, as those of all ``hosts`` do; local."""
        if self._file is not None and self.begin.sample < self._plan.samples:
            with of_disk(label(self._sink)):
                self._file.reopen(hosts)
            self.writes = True

    def aligned(self, layout: Decomposition, sample: int) -> Decomposition:
        """The layout whose blocks end where chunks end, with the rest of each in a later block."""
        if self._file is None or self._file.chunks is None:
            return layout
        # A source without a batch has one sample.
        chunks = self._file.chunks if self._plan.form.has_batch else (1, *self._file.chunks)
        begin = () if self._place is None else self._place.begin
        start = [sample * self._plan.form.has_batch, *[0] * (len(chunks) - 1 - len(begin)), *begin]
        ends = [a + n for a, n in zip(start, layout.shape, strict=True)]
        return aligned(layout, start, chunks, ends, nearest=False)

    def write(self, box: Slices, y: torch.Tensor) -> None:
        """Write a box of the result."""
        if self._place is not None:
            dims = len(self._place.whole)
            there, here = self._place.of(box[-dims:])
            box, y = (*box[:-dims], *there), y[(*[slice(None)] * (y.dim() - dims), *here)]
            if y.numel() == 0:
                return
        # A function of the user may call HDF5's library, as one that reads ahead.
        with hdf5_lock(self._file is None), of_disk(label(self._sink)):
            self._sink[box] = y if isinstance(self._sink, torch.Tensor) else as_numbers(y)

    def keep(self, sample: int, address: Address, message: Message) -> None:
        """Keep a message of a sample for a process that goes on."""
        with of_disk(self._folder):
            self._log.keep(sample, address, message)

    def ended(self, sample: int, slabs: int) -> None:
        """Note that the first ``slabs`` of a sample are written.

        The state is written before messages are removed: a process that is killed between both finds more
        messages than it needs, never fewer.
        """
        if self._file is None:
            return
        with of_disk(self._folder):
            if slabs == self._plan.slabs:
                self._note(sample + 1, 0, 0)
                self._log.clear()
                return
            before, _, first = self._state
            first = first if sample == before else 0
            if self._keeps and self._log.has_all_for(slabs):
                first = slabs
            self._note(sample, slabs, first)
            self._log.forget(sample, first)

    @property
    def _keeps(self) -> bool:
        # Where all slabs wait for each other, none can go on alone.
        return self._plan.slabs > 1 and not self._plan.waits

    def _check(self, sink: Any) -> None:
        shape, dtype = tuple(getattr(sink, "shape", ())), getattr(sink, "dtype", None)
        if not hasattr(sink, "__setitem__") or shape != self._shape:
            raise ShapeError(
                f"predict: the result has shape {self._shape}, {label(sink)} {shape}; a sink is a path,"
                " or takes sink[box] = array"
            )
        if isinstance(sink, torch.Tensor) and sink.dtype == self._plan.dtype:
            return
        wanted, found = numpy_dtype(self._plan.dtype), numpy_dtype(dtype)
        if found != wanted:
            raise ShapeError(
                f"predict: {label(sink)} has elements of {found}, the result of {wanted}; convert it by post="
            )

    def _resumed(self, file: ArraySink) -> bool:
        # Whether an earlier process has begun the same; goes on with that.
        try:
            text = (self._folder / _STATE).read_text()
            sample, written, first = json.loads(text)["state"]
            if text != self._text_of(sample, written, first):
                return False
            if Path(file.path).exists():
                if sample < self._plan.samples or file.part.exists():
                    return False
                # It was complete, and was killed while it removed the folder.
                self._file = None
                shutil.rmtree(self._folder)
                messages = list[tuple[Address, Message]]()
            else:
                messages = self._log.read(sample, first)
                file.reopen()
                # What Zarr was writing when the process was killed.
                for left in file.part.rglob("*.partial"):
                    left.unlink()
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._state = sample, written, first
        self.begin = Begin(sample, first, written, tuple(messages), self._keeps)
        return True

    def _note(self, sample: int, written: int, first: int) -> None:
        self._state = sample, written, first
        new = self._folder / f"{_STATE}.new"
        new.write_text(self._text_of(sample, written, first))
        new.replace(self._folder / _STATE)

    def _text_of(self, *state: int) -> str:
        # The file of a state. With its hash, so that a damaged one is not that of any state.
        digest = blake2b(f"{self._key} {state}".encode(), digest_size=16).hexdigest()
        return json.dumps({"state": state, "digest": digest})

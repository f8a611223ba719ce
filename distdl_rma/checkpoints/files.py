"""The files of checkpoints: written under a temporary name, complete when renamed, checked when read."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from distdl_rma.checkpoints.behind_writer import BehindWriter
from distdl_rma.checkpoints.form import NAMED_DTYPES
from distdl_rma.checkpoints.items import Item, Kind, Part
from distdl_rma.dtypes import flat_bytes
from distdl_rma.errors import CheckpointError

DATA, MANIFEST, VERSION = "data.safetensors", "manifest.json", 1
_STEP = re.compile(r"step-(\d+)(\.old)?")
# Bytes that are read or written, and summed, at a time; a multiple of every element's size.
_IN_CACHE = 1 << 18

# Elements of a part from one number on, as flat bytes.
Piece = tuple[Part, int, torch.Tensor]


def step_folder(folder: Path, step: int) -> Path:
    """Directory of a complete checkpoint."""
    return folder / f"step-{step}"


def temporary(path: Path) -> Path:
    """Directory in which a checkpoint is written."""
    return path.with_name(path.name + ".tmp")


def _replaced(path: Path) -> Path:
    # A checkpoint of the same step, while a new one takes its place.
    return path.with_name(path.name + ".old")


def complete(folder: Path, step: int | None = None) -> list[Path]:
    """Directories with a manifest, newest first: by step, and a replaced one behind its successor.

    Those of one step, if it is not None.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name and step in (None, int(name[1])) and (path / MANIFEST).is_file():
            found.append((int(name[1]), name[2] is None, path))
    return [path for *_, path in sorted(found, reverse=True)]


@contextmanager
def explained(what: str, path: Path, advice: str) -> Iterator[None]:
    """Context that turns an ``OSError`` into a ``CheckpointError`` with the file and what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: {what} {path} failed: {error.strerror or error}; {advice}"
        ) from error


_TO_WRITE = "check space, quota and permission; complete checkpoints are as before"


def digest(text: bytes) -> str:
    """Checksum of a text."""
    return sha256(text).hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tidy(folder: Path) -> None:
    """Delete what killed jobs have left in a folder; by one rank, before it writes there.

    Directories with files that no checkpoint has stay, such as ``step-5`` of another library.
    """
    for path in filter(Path.is_dir, folder.glob("step-*")):
        left = path.suffix == ".tmp" or (_STEP.fullmatch(path.name) and not (path / MANIFEST).exists())
        if left and not _belongs_to_others(path):
            shutil.rmtree(path, ignore_errors=True)


def _belongs_to_others(path: Path) -> bool:
    return path.is_dir() and not {each.name for each in path.iterdir()} <= {DATA, MANIFEST}


def begin(path: Path, head: bytes, nbytes: int) -> None:
    """Make the temporary directory of a checkpoint, and its data file of full size; by one rank."""
    made = temporary(path)
    for other in filter(_belongs_to_others, (path, _replaced(path))):
        raise CheckpointError(
            f"checkpoint: {other} is in the way, and no checkpoint of this library; move it, or save into"
            " another folder"
        )
    with explained("making", made / DATA, _TO_WRITE):
        if made.exists():
            shutil.rmtree(made)
        made.mkdir(parents=True)
        try:
            with (made / DATA).open("wb") as file:
                file.write(head)
                file.truncate(nbytes)
        except OSError:
            drop(path)
            raise


def write(path: Path, pieces: Iterable[Piece]) -> dict[str, int]:
    """Write pieces to the temporary data file, and make them durable; returns sums by the item's name.

    Local: every rank writes its own pieces, also from another thread.
    """
    file, sums = temporary(path) / DATA, dict[str, int]()
    with explained("writing", file, f"is it on a disk that all hosts share? {_TO_WRITE}"):
        writer = BehindWriter(file)
        try:
            for part, first, elements in _in_cache(pieces):
                sums[part.item.name] = sums.get(part.item.name, 0) + part.checksum(elements, first)
                for offset, memory in _runs(part, first, elements):
                    writer.append(offset, memory)
            writer.finish()
        finally:
            writer.close()
    return sums


def publish(path: Path, body: dict[str, Any]) -> None:
    """Write the manifest, and rename the directory to its own name; by one rank."""
    made, text = temporary(path), json.dumps(body)
    with explained("completing", made, _TO_WRITE):
        with (made / MANIFEST).open("w") as file:
            file.write(json.dumps({"sha256": digest(text.encode()), "body": body}))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(made)
        if path.exists():
            # Of a replaced checkpoint one of the two is there at any moment.
            shutil.rmtree(_replaced(path), ignore_errors=True)
            path.rename(_replaced(path))
        made.rename(path)
        _sync_folder(path.parent)


def delete_old(path: Path, keep: int | None) -> None:
    """Delete a checkpoint's predecessors but ``keep - 1``, and the one that it replaced; by one rank."""
    with explained("deleting old checkpoints in", path.parent, "the new one is complete"):
        found = complete(path.parent)
        # A job that was killed in between has left the only one of its step under this name.
        replaced = [other for other in map(_replaced, found) if other in found]
        others = [other for other in found if other != path and other not in replaced]
        for each in (*replaced, *(() if keep is None else others[keep - 1 :])):
            # Without its manifest a directory does not count, should this be interrupted.
            (each / MANIFEST).unlink()
            shutil.rmtree(each)


def drop(path: Path) -> None:
    """Delete what was written of a checkpoint that failed; by one rank."""
    shutil.rmtree(temporary(path), ignore_errors=True)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as its manifest describes it; of newer or damaged ones ``CheckpointError``."""

    path: Path
    body: dict[str, Any]
    others: tuple[str, ...] = ()

    @property
    def data(self) -> Path:
        """The data file."""
        return self.path / DATA

    def items(self, names: Iterable[str]) -> list[Item]:
        """Items of these names, in the order of the file."""
        wanted, found = set(names), self.body["items"]
        return [
            Item(name, NAMED_DTYPES[kind], tuple(shape), offset)
            for name, kind, shape, offset, _ in found
            if name in wanted
        ]

    def kinds(self) -> dict[str, Kind]:
        """Dtype and shape of each item."""
        return {name: (kind, tuple(shape)) for name, kind, shape, *_ in self.body["items"]}

    def sums(self) -> dict[str, int]:
        """Checksum of each item."""
        return {name: int(total, 16) for name, *_, total in self.body["items"]}

    def damaged(self, what: str, file: Path) -> CheckpointError:
        """Error that says what is wrong with a file, and which checkpoint came before."""
        before = f"the one before it is {self.others[0]}" if self.others else "there is none before it"
        return CheckpointError(
            f"checkpoint: {file} is damaged: {what}; {before}: delete {self.path} or restore(..., step=)"
        )


def opened(path: Path) -> Saved:
    """A checkpoint's manifest, checked together with the size and the head of the data file; local."""
    newest = complete(path.parent)
    older = newest[newest.index(path) + 1 :] if path in newest else []
    file = path / MANIFEST
    saved = Saved(path, {}, tuple(str(each) for each in older))
    with explained("reading", file, "is the folder right, and may it be read?"):
        try:
            found = json.loads(file.read_text())
            body = found["body"]
            found_digest = digest(json.dumps(body).encode())
        except (ValueError, KeyError, TypeError):
            raise saved.damaged("it is no manifest", file) from None
        version = body.get("version") if isinstance(body, dict) else None
        fits = found_digest == found.get("sha256")
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"checkpoint: {file} is of version {version}, this distdl_rma reads {VERSION}: update it"
                + ("" if fits else ", or the file is damaged: its checksum does not fit")
            )
        if not fits:
            raise saved.damaged("its checksum does not fit", file)
    saved = Saved(path, body, saved.others)
    if not saved.data.is_file():
        raise saved.damaged("it is missing", saved.data)
    with explained("reading", saved.data, "may it be read?"):
        nbytes = saved.data.stat().st_size
        if nbytes != body["nbytes"]:
            raise saved.damaged(f"it has {nbytes} bytes instead of {body['nbytes']}", saved.data)
        with saved.data.open("rb") as data:
            if digest(data.read(body["head"][0])) != body["head"][1]:
                raise saved.damaged("the checksum of its head does not fit", saved.data)
    return saved


def read(file: Path, pieces: Iterable[Piece]) -> dict[str, int]:
    """Fill pieces from a data file; returns sums by the item's name. Local."""
    sums = dict[str, int]()
    with file.open("rb") as data:
        for part, first, elements in _in_cache(pieces):
            name = part.item.name
            for begin, memory in _runs(part, first, elements):
                rest, offset = memory, begin
                while rest:
                    got = os.preadv(data.fileno(), [rest], offset)
                    if not got:
                        raise CheckpointError(f"checkpoint: {name!r} ends before its last byte")
                    rest, offset = rest[got:], offset + got
            sums[name] = sums.get(name, 0) + part.checksum(elements, first)
    return sums


def _in_cache(pieces: Iterable[Piece]) -> Iterator[Piece]:
    # Parts of pieces that are summed and copied while they are in the core's cache.
    for part, first, elements in pieces:
        for low in range(0, elements.numel(), _IN_CACHE):
            yield part, first + low // part.item.dtype.itemsize, elements[low : low + _IN_CACHE]


def _runs(part: Part, first: int, elements: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    # The offset in the file of each contiguous run of a piece, and its memory.
    memory, size = elements.numpy().data, part.item.dtype.itemsize
    for offset, at, count in part.runs(first, first + len(memory) // size):
        yield offset, memory[(at - first) * size : (at - first + count) * size]


def cut_out(tensors: dict[str, torch.Tensor], shares: Iterable[tuple[Part, int, int]]) -> Iterator[Piece]:
    """Pieces of this rank's tensors, by the item's name."""
    for part, first, last in shares:
        size = part.item.dtype.itemsize
        yield part, first, flat_bytes(tensors[part.item.name])[first * size : last * size]

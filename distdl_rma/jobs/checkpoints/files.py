"""The files of checkpoints: written under a temporary name, complete when renamed, checked when read.

The name of a directory says what is in it. A process may be killed between any two lines of this table, and
the newest complete checkpoint is whole at any moment::

    step-20.tmp      begin       the first rank makes the data file, of full size
                     write       every rank writes its bytes, and waits for the disk
                     publish     the first rank writes the manifest, which has all checksums
    step-25          publish     of a run that was left: becomes step-25.retired, which nobody deletes
    step-20          publish     if it is there already: becomes step-20.old
    step-20.tmp      publish     becomes step-20: complete
    step-20.old      delete_old  goes, and so do all but the last ones; first their manifests

A directory counts if it has a manifest and its name is ``step-N`` or ``step-N.old``. Files of others, and
links, may lie in the folder. So nothing is deleted that does not begin as a manifest of this library does,
and no file by another name than the two of a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from itertools import count as counted
from pathlib import Path
from typing import Any

import torch

from distdl_rma.errors import CheckpointError, DistdlError, UnsupportedError, told
from distdl_rma.jobs.checkpoints.form import dtype_name
from distdl_rma.jobs.checkpoints.items import MODULUS, Item, Kind, Part, planned
from distdl_rma.jobs.checkpoints.shares import Share
from distdl_rma.layers.dtypes import flat_bytes
from distdl_rma.layers.sources.raw import handle, read_at, rename_synced, runs, sync, write_at
from distdl_rma.layers.staging import down

DATA, MANIFEST, VERSION = "data.safetensors", "manifest.json", 1
# How a manifest of this library begins; the most bytes of one, since a reader needs some times as many: it
# must not be the file of a stranger that decides how much memory a rank needs.
_BEGINS, _MOST_NBYTES = b'{"sha256": "', 64 << 20
# Most dimensions of an item, those of torch, and the least bytes of it in the head of the data file.
_MOST_DIMS, _ITEM_NBYTES = 64, 40
_STEP = re.compile(r"step-(0|[1-9][0-9]*)(\.old)?")
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


def _step_of(path: Path) -> int:
    # -1 for the names of others.
    name = _STEP.fullmatch(path.name)
    return int(name[1]) if name else -1


def complete(folder: Path, step: int | None = None) -> list[Path]:
    """Directories with a manifest, newest first: by step, and a replaced one behind its successor.

    Those of one step, if it is not None.
    """
    found = [
        (_step_of(path), not path.suffix, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _step_of(path) >= 0 and step in (None, _step_of(path)) and (path / MANIFEST).is_file()
    ]
    return [path for *_, path in sorted(found, reverse=True)]


def explained(what: str, path: Path, advice: str) -> AbstractContextManager[object]:
    """Context that turns an ``OSError`` into a ``CheckpointError`` with the file and what to do.

    The advice is of the caller: a full disk where bytes are written, a folder that other hosts do not see
    where they are read.
    """
    return told(CheckpointError, f"checkpoint: {what} {path} failed", advice, OSError)


_TO_WRITE = "check space, quota and permission; complete checkpoints are as before"


def digest(text: bytes) -> str:
    """Checksum of a text."""
    return sha256(text).hexdigest()


def tidy(folder: Path) -> None:
    """Delete what killed jobs have left in a folder; by one rank, before it writes there.

    What is not of this library stays, such as links, other names, and directories with files of others.
    """
    for path in folder.glob("step-*"):
        name = path.name.removesuffix(".tmp")
        left = _STEP.fullmatch(name) and (name != path.name or not (path / MANIFEST).exists())
        with suppress(OSError):
            if left and not path.is_symlink() and _is_own(path, alone=True):
                _delete(path)


def _is_own(path: Path, alone: bool = False) -> bool:
    # Whether a directory is a checkpoint of this library, or has nothing but the rest of one; ``alone``:
    # without files of others. Of a checkpoint with files of others its own two are deleted, and the directory
    # stays; a temporary one with such files is not ours.
    found = {each.name for each in path.iterdir()} if path.is_dir() else {""}
    if (alone or MANIFEST not in found) and not found <= {DATA, MANIFEST}:
        return False
    if not (path / MANIFEST).is_file():
        return MANIFEST not in found
    with (path / MANIFEST).open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS


def _delete(path: Path) -> None:
    # The files of a checkpoint, and its directory unless others have files there; of a link only the link.
    if path.is_symlink():
        path.unlink()
        return
    # Without its manifest a directory does not count, should this be interrupted.
    for name in (MANIFEST, DATA):
        (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def begin(path: Path, head: bytes, body: dict[str, Any]) -> None:
    """Make the temporary directory of a checkpoint, and its data file of full size; by one rank.

    What is in the way of any later step is refused here, before the ranks write gigabytes. The data file has
    its full size from the beginning, so that ranks can write anywhere in it.
    """
    made = temporary(path)
    if (nbytes := len(json.dumps(body))) > _MOST_NBYTES:
        raise UnsupportedError(
            f"checkpoint: {MANIFEST} of {path} would have {nbytes >> 20} MiB, and may have"
            f" {_MOST_NBYTES >> 20} MiB: make tensors or arrays of long lists, strings and bytes of the state"
        )
    with explained("making", made / DATA, _TO_WRITE):
        for other in (path, _replaced(path), made):
            if os.path.lexists(other) and not other.is_symlink() and not _is_own(other, other != path):
                raise CheckpointError(
                    f"checkpoint: {other} is in the way, with files of no checkpoint of this library; move"
                    " it, or save into another folder"
                )
        if os.path.lexists(made):
            _delete(made)
        made.mkdir(parents=True)
        try:
            with (made / DATA).open("wb") as file:
                file.write(head)
                file.truncate(body["nbytes"])
        except OSError:
            drop(path)
            raise


def write(path: Path, pieces: Iterable[Piece]) -> Counter[str]:
    """Write pieces to the temporary data file, and make them durable; returns sums by the item's name.

    Local: every rank writes its own pieces, also from another thread.
    """
    file = temporary(path) / DATA
    advice = f"is it on a disk that all hosts share? {_TO_WRITE}"
    with explained("writing", file, advice):
        with handle(file, os.O_WRONLY) as data:
            sums = _moved(pieces, lambda offset, memory: write_at(data, memory, offset))
            os.fsync(data)
        return sums


def read(file: Path, pieces: Iterable[Piece]) -> Counter[str]:
    """Fill pieces from a data file; returns sums by the item's name. Local."""
    with file.open("rb") as data:

        def fill(offset: int, memory: memoryview) -> None:
            if read_at(data.fileno(), memory, offset) < len(memory):
                raise CheckpointError(f"checkpoint: {file} ends before its last byte")

        return _moved(pieces, fill)


def _moved(pieces: Iterable[Piece], move: Callable[[int, memoryview], object]) -> Counter[str]:
    # Moves each contiguous run of bytes to or from its offset, and sums the elements: both while these are in
    # the core's cache, so that the sums cost little. Written and read bytes are summed in memory: what went
    # wrong between the two, in this library, the system or the disk, changes a sum.
    sums = Counter[str]()
    for part, begin, held in pieces:
        size, elements = part.item.dtype.itemsize, down(held)
        for low in range(0, elements.numel(), _IN_CACHE):
            some, first = elements[low : low + _IN_CACHE], begin + low // size
            memory = some.numpy().data
            for place, at, count in runs(part.item.shape, part.box, first, first + len(memory) // size):
                run = memory[(at - first) * size : (at - first + count) * size]
                move(part.item.offset + place * size, run)
            sums[part.item.name] = (sums[part.item.name] + part.checksum(some, first)) % MODULUS
    return sums


def cut_out(tensors: dict[str, torch.Tensor], shares: Iterable[Share]) -> Iterator[Piece]:
    """Pieces of this rank's tensors, by the item's name."""
    for part, first, last in shares:
        size = part.item.dtype.itemsize
        yield part, first, flat_bytes(tensors[part.item.name])[first * size : last * size]


def laid_out(memory: torch.Tensor, shares: Iterable[Share]) -> Iterator[Piece]:
    """Pieces of memory in which the elements of shares follow each other, as ranks send them."""
    at = 0
    for part, first, last in shares:
        size = (last - first) * part.item.dtype.itemsize
        yield part, first, memory[at : at + size]
        at += size


def publish(path: Path, body: dict[str, Any], at: int | None) -> None:
    """Write the manifest, and rename the directory to its own name; by one rank.

    Complete checkpoints of later steps, and of steps behind ``at``, which the job has saved or restored last,
    are of a run that was left: they get other names first, since the one with the highest step counts. They
    are not deleted, since they may be the better ones of two runs.

    Each step is on the disk before the next one: after a loss of power there is no directory whose name
    promises more than it has.
    """
    made, text = temporary(path), json.dumps(body)
    with explained("completing", made, _TO_WRITE):
        (made / MANIFEST).write_text(json.dumps({"sha256": digest(text.encode()), "body": body}))
        sync(made / MANIFEST)
        sync(made)
        beyond = min(_step_of(path), _step_of(path) if at is None else at)
        later = [each for each in complete(path.parent) if _step_of(each) > beyond and _is_own(each)]
        retired = [str(_retired(each)) for each in later]
        sync(path.parent)
        if (path / MANIFEST).exists():
            # Of a replaced checkpoint one of the two is there at any moment.
            if os.path.lexists(_replaced(path)):
                _delete(_replaced(path))
            path.rename(_replaced(path))
        elif os.path.lexists(path):
            _delete(path)
        rename_synced(made, path)
    if retired:
        # Last: a warning may be an error, and the checkpoint is complete then.
        warnings.warn(
            f"Checkpoints.save: {path} goes on from an earlier step; checkpoints of the run that was left"
            f" are now {', '.join(retired)}: delete them, or give one its old name to go on from there",
            RuntimeWarning,
            stacklevel=2,
        )


def _retired(path: Path) -> Path:
    # The new name of a checkpoint that no longer counts, and that is never deleted.
    names = (f"step-{_step_of(path)}.retired{f'-{n}' if n > 1 else ''}" for n in counted(1))
    return path.rename(next(n for n in map(path.with_name, names) if not os.path.lexists(n)))


def delete_old(path: Path, keep: int | None) -> None:
    """Delete a checkpoint's predecessors but ``keep - 1``, and the one that it replaced; by one rank."""
    with explained("deleting old checkpoints in", path.parent, "the new one is complete"):
        found = complete(path.parent)
        # A job that was killed in between has left the only one of its step under this name.
        replaced = [other for other in map(_replaced, found) if other in found]
        others = [other for other in found if other != path and other not in replaced]
        for each in filter(_is_own, (*replaced, *(() if keep is None else others[keep - 1 :]))):
            _delete(each)
            if each in replaced and each.exists():
                # Files of others would be in the way when this step is replaced again.
                _retired(each)


def drop(path: Path) -> None:
    """Delete what was written of a checkpoint that failed; by one rank."""
    with suppress(OSError):
        _delete(temporary(path))


@contextmanager
def named(name: str) -> Iterator[None]:
    """Context in which errors of a checkpoint have its name.

    Rooms below know objects and values, not files. Their messages begin with ``checkpoint:``.
    """
    try:
        yield
    except DistdlError as error:
        error.args = (str(error).replace("checkpoint:", f"{name}:", 1),)
        raise


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as its manifest describes it; of newer or damaged ones ``CheckpointError``.

    One rank opens the manifest, and the others get its body: they agree by construction on what they restore,
    also if another job completes a newer checkpoint meanwhile.
    """

    path: Path
    body: dict[str, Any]
    others: tuple[str, ...] = ()

    @property
    def data(self) -> Path:
        """The data file."""
        return self.path / DATA

    def kinds(self) -> dict[str, Kind]:
        """Dtype and shape of each item."""
        return {name: (kind, tuple(shape)) for name, kind, shape, *_ in self.body["items"]}

    def items(self, names: Container[str]) -> list[Item]:
        """Items of these names, in the order of the file."""
        return [item for item in planned(self.kinds(), self.body["step"])[1] if item.name in names]

    def check_sums(self, found: Mapping[str, int]) -> None:
        """Raise if checksums of some items, by name, are not those of the manifest."""
        for name, *_, total in self.body["items"]:
            if found.get(name, int(total, 16)) != int(total, 16):
                raise self.damaged(f"the checksum of {name!r} does not fit", self.data)

    def damaged(self, what: str, file: Path) -> CheckpointError:
        """Error that says what is wrong with a file, and which checkpoint came before."""
        before = f"the one before it is {self.others[0]}" if self.others else "there is none before it"
        return CheckpointError(
            f"checkpoint: {file} is damaged: {what}; {before}: delete {self.path} or restore(..., step=)"
        )

    def check(self) -> None:
        """Raise an error of Python unless the entries fit together; the values of forms are not read.

        The manifest has a checksum of its own, but that says only that nobody changed it by accident. These
        checks are against one that was made to harm: no size makes a rank allocate what the file has not.
        """
        body, listed = self.body, self.body["items"]
        numbers = chain([body["step"], body["ranks"]], *(item[2] for item in listed))
        fits = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) and body["version"] == VERSION
        # Nor are there more items than the head has room for, before each is looked at.
        fits = fits and _ITEM_NBYTES * len(listed) <= body["head"][0]
        if not (fits and all(len(item[2]) <= _MOST_DIMS for item in listed)):
            raise ValueError("it has sizes that no tensor has")
        # Place and size of everything follow from names, dtypes and shapes.
        wanted = described(*planned(self.kinds(), body["step"]))
        fits = {key: body[key] for key in wanted} | {"items": [item[:4] for item in listed]} == wanted
        fits = fits and all(re.fullmatch("[0-9a-f]{16}", total) for *_, total in listed)
        if not (fits and isinstance(body["main"], (str, type(None))) and isinstance(body["forms"], dict)):
            raise ValueError("its entries do not fit together")


def described(head: bytes, items: Iterable[Item]) -> dict[str, Any]:
    """What a manifest says of the data file, but for the checksums of the items."""
    listed = [[i.name, dtype_name(i.dtype), [*i.shape], i.offset] for i in items]
    nbytes = len(head) + sum(item.nbytes for item in items)
    return {"nbytes": nbytes, "head": [len(head), digest(head)], "items": listed}


def opened(path: Path) -> Saved:
    """A checkpoint's manifest, checked together with the size and the head of the data file; local.

    From outside to inside: no bytes are decoded before their number is known, no entry is believed before the
    checksum of all fits, and a newer version is named before its entries are looked at, which may be others.
    """
    newest = complete(path.parent)
    older = newest[newest.index(path) + 1 :] if path in newest else []
    file, others = path / MANIFEST, tuple(str(each) for each in older)
    with explained("reading", file, "is the folder right, and may it be read?"), file.open("rb") as manifest:
        text = manifest.read(_MOST_NBYTES + 1)
    saved = Saved(path, {}, others)
    if len(text) > _MOST_NBYTES:
        raise saved.damaged(f"it has more than {_MOST_NBYTES >> 20} MiB", file)
    try:
        found = json.loads(text.decode())
        saved = Saved(path, found["body"], others)
        fits, version = digest(json.dumps(saved.body).encode()) == found["sha256"], saved.body["version"]
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"checkpoint: {file} is of version {version}, this distdl_rma reads {VERSION}: update it"
                + ("" if fits else ", or the file is damaged: its checksum does not fit")
            )
        if fits:
            saved.check()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise saved.damaged(f"it is no manifest: {type(error).__name__}: {error}", file) from None
    if not fits:
        raise saved.damaged("its checksum does not fit", file)
    if not saved.data.is_file():
        raise saved.damaged("it is missing", saved.data)
    with explained("reading", saved.data, "may it be read?"):
        nbytes, wanted = saved.data.stat().st_size, saved.body["nbytes"]
        if nbytes != wanted:
            raise saved.damaged(f"it has {nbytes} bytes instead of {wanted} bytes", saved.data)
        with saved.data.open("rb") as data:
            if digest(data.read(saved.body["head"][0])) != saved.body["head"][1]:
                raise saved.damaged("the checksum of its head does not fit", saved.data)
    return saved

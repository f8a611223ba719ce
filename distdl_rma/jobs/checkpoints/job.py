"""Checkpoints of a job: all ranks save and restore together, and agree on every step of it.

An asynchronous ``save``, and the later calls that complete it; ``|`` is where all ranks meet::

    rank 0    compare | make files | copy          step    step    due |  sums | manifest, rename | delete old
    rank 1    compare |            | copy          step    step    due |  sums |                  |
    threads                                write, wait for the disk

Without ``asynchronous`` each rank writes in the place of its copy, and goes on to the sums.

``restore`` goes the other way: each byte is read by one rank, all sums are compared, then ranks that hold the
same pass their shares on through segments. A disk is slower than these, and a network's disk is shared, so
that P ranks that read the same P times would take P times as long.

An error of one rank is one of all. Whatever may fail on one rank alone, a full disk, an object that refuses
its state, stands in a ``together``, behind which all ranks go on or none does. So no rank publishes what
another one has not written, and no rank trains on while another one has given up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from distdl_rma.errors import (
    CheckpointError,
    ClosedError,
    ConfigurationError,
    MismatchError,
    check_integers,
    told,
)
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.checkpoints import files, objects
from distdl_rma.jobs.checkpoints.files import Piece, Saved
from distdl_rma.jobs.checkpoints.items import Item, Part, planned
from distdl_rma.jobs.checkpoints.shares import Holding, holdings
from distdl_rma.layers.dtypes import digest, flat_bytes
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.ops.set_up_transfer import broadcast_from_first
from distdl_rma.layers.staging import explain_memory
from distdl_rma.layers.state import scattered
from distdl_rma.segments.collectives.allgather import Allgather
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import Consensus, gather_words, together
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.transport.pool import Pool

# Bytes that ranks which hold the same pass on at once: with the copies, they stay in a core's cache.
_SLICE_NBYTES = 1 << 19
_LOWEST_PRIORITY = 19
# Checkpoints whose copies are in memory at once: a slow disk makes ``save`` wait, rather than the copies of
# ever more checkpoints fill the memory.
_UNDER_WAY = 2


class _Job(NamedTuple):
    # A checkpoint that is being written: its directory, its manifest without sums, what waits for this rank's
    # bytes and gives their sums, and whether that would return at once.
    path: Path
    body: dict[str, Any]
    written: Callable[[], Counter[str]]
    is_written: Callable[[], bool] = lambda: False


# A holding, and this rank's share of its bytes in memory.
_Share = tuple[Holding, torch.Tensor]


def _joined(states: list[dict[str, Any]]) -> dict[str, list[Any]]:
    # For each generator one state if it is alike on all ranks, else that of every rank. One state can be
    # restored on any number of ranks, several on as many ranks only.
    columns = {key: [state[key] for state in states] for key in states[0]}
    return {key: each[:1] if each[1:] == each[:-1] else each for key, each in columns.items()}


def _digest(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    try:
        return digest(tensors[name])
    except torch.OutOfMemoryError as error:
        explain_memory(error, f"the comparison of {name!r}", [tensors[name]])
        raise


class Checkpoints:
    """Checkpoints in a folder, of jobs of any number of ranks: the newest one is complete at any moment.

    A checkpoint is a directory such as ``step-120`` with ``manifest.json`` and ``data.safetensors``, which
    has whole tensors with the keys of the sequential model. Every rank writes its parts. The directory has
    the name ``step-120.tmp`` until all bytes are on the disk.

    All methods are collective over the machine and blocking, ``stopping`` excepted; all ranks pass the same
    arguments. An error of one rank raises on all of them. As a context manager it closes itself.

    Parameters
    ----------
    folder
        Where the directories are made; on a disk that all hosts share. Its parent exists.
    keep
        How many complete checkpoints stay. A thread deletes older ones behind a newer one, until the next
        call of ``save``, ``wait``, ``restore`` or ``close``. None: all.
    every
        Number of steps between two checkpoints, for ``due``; None: only when a signal asks the job to stop.
    asynchronous
        Whether ``save`` returns when the state has been copied to private memory. A thread then writes it,
        and a later call of any method completes it. At most two copies exist.
    stop_on
        A signal such as ``signal.SIGUSR1``, or several, on which ``due`` is true on all ranks at their next
        step. They do nothing else then. ``close`` restores their handlers.
    machine
        A machine, or a partition of its ranks; the one of COMM_WORLD if None.

    Raises
    ------
    ConfigurationError
        If an argument is invalid, or differs between ranks; on all ranks.
    CheckpointError
        If the folder cannot be made.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 4, 3), {"H": -1})
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> state = {"model": model, "optimizer": optimizer}
    >>> with Checkpoints("run", every=2) as checkpoints:
    ...     for step in range(checkpoints.restore(state), 4):  # from 0 in a new folder
    ...         model(torch.ones(1, 1, 8, 8)).mean().backward()
    ...         optimizer.step()
    ...         if checkpoints.due(step + 1):
    ...             path = checkpoints.save(state, step + 1)
    >>> load_checkpoint("run", nn.Conv2d(1, 4, 3))
    4
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        asynchronous: bool = False,
        stop_on: signal.Signals | Iterable[signal.Signals] = (),
        machine: Machine | Partition | None = None,
    ) -> None:
        self._call = "Checkpoints"
        self._machine = Machine.on() if machine is None else Machine.of(machine)
        self._every, self._keep, self._asynchronous = every, keep, asynchronous
        with self._together(differs=ConfigurationError) as facts:
            self.folder, self._signals = Path(folder).absolute(), _signals(stop_on)
            for name, number in (("keep", keep), ("every", every)):
                if number is not None and (type(number) is not int or number < 1):
                    raise ConfigurationError(f"Checkpoints: {name} is at least 1 or None, got {number!r}")
            facts |= {"folder": str(self.folder), "keep": keep, "every": every, "asynchronous": asynchronous}
        self._jobs: deque[_Job] = deque()
        # Memory of the copies: the first use of new pages takes longer than the copy.
        self._pool = Pool(sys.maxsize)
        # Writes while a step computes, and deletes old checkpoints. Linux has priorities for threads: the
        # step's own go first. An executor of one thread, as all threads of jobs that do one thing after the
        # other; but not the scratch file's, which finalizers give work to.
        self._thread = ThreadPoolExecutor(
            1,
            "checkpoint",
            lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY),
        )
        self._deletion: Future[None] | None = None
        # The step that was saved or restored last: what follows it in the folder is of a run that was left.
        self._at: int | None = None
        self._signalled = self._stopping = self._closed = self._tidy = False
        self._handlers = dict[signal.Signals, Any]()
        try:
            with self._together():
                if self._first:
                    with files.explained("making", self.folder, "its parent exists, and may be written to?"):
                        self.folder.mkdir(exist_ok=True)
                for each in self._signals:
                    self._handlers[each] = signal.signal(each, self._note_signal)
        except BaseException:
            self._restore_handlers()
            raise

    @property
    def _first(self) -> bool:
        return self._machine.rank == self._machine.ranks[0]

    @property
    def stopping(self) -> bool:
        """Whether some rank has got a signal of ``stop_on``, as of the last ``due``; local."""
        return self._stopping

    def _note_signal(self, *_: object) -> None:
        self._signalled = True

    def due(self, step: int) -> bool:
        """Whether to save now: at every ``every``-th step, and when a signal asks the job to stop.

        Costs one comparison of integers. Completes asynchronous checkpoints that all ranks have written, and
        raises their errors. ``MismatchError`` if the ranks are at different steps.
        """
        self._call = "Checkpoints.due"
        invalid = type(step) is not int or step < 0
        (_, signalled, least), (_, stopping, most) = self._compared(-1 if invalid else step)
        if least < 0:
            got = f"got {step!r}" if invalid else "another rank got something else"
            raise ConfigurationError(f"Checkpoints.due: step is an integer, at least 0, {got}")
        if least != most:
            raise MismatchError(f"Checkpoints.due: the ranks are at steps from {least} to {most}")
        self._stopping = self._stopping or bool(signalled or stopping)
        return self._stopping or (self._every is not None and step > 0 and step % self._every == 0)

    def _compared(self, step: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Smallest and largest of: whether the oldest job is written here, the signal, the step. One
        # comparison of three integers serves all of them, since ``due`` is called at every step. The oldest
        # job is completed if all ranks have written it, as the smallest number says: a rank alone must not
        # decide this.
        if self._closed:
            raise ClosedError("Checkpoints: already closed")
        written = int(bool(self._jobs) and self._jobs[0].is_written())
        check = Consensus.of(self._machine.segments, self._machine.ranks)
        check.alike(self._call, written, int(self._signalled), step)
        found = check.smallest[1:], check.largest[1:]
        if found[0][0]:
            self._complete()
        return found

    def wait(self) -> None:
        """Wait until all saved checkpoints are complete."""
        self._call = "Checkpoints.wait"
        while self._jobs:
            self._complete()
        self._wait_for_deletion()

    def close(self) -> None:
        """Complete all checkpoints and restore the handlers of signals; idempotent."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._restore_handlers()
            self._thread.shutdown()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The ranks may be in different calls: waiting for the others could hang, and hide the error.
            self._restore_handlers()

    def save(self, state: MutableMapping[str, Any], step: int) -> Path:
        """Save the state of all objects as the checkpoint of a step; returns its directory.

        Parameters
        ----------
        state
            Names and objects: models, optimizers, objects with ``state_dict`` and ``load_state_dict``
            (schedulers, scalers, averaged models, loaders), tensors, split tensors, generators of random
            numbers, numbers, strings, arrays, lists and dicts of these. The generators of torch, Python and
            numpy are saved besides; of torch's those of the CPU and of the devices of tensors. Tensors that
            are whole on all ranks have to be equal there; each rank writes some bytes of them.
        step
            Number of the step; a complete checkpoint of this step is replaced. Those of later steps, and
            those behind the step that this job has saved or restored last, are of a run that was left: they
            get names such as ``step-20.retired``, with a ``RuntimeWarning`` on one rank, and stay.

        Raises
        ------
        UnsupportedError
            If an object cannot be saved exactly without pickle, or the manifest would exceed 64 MiB; before
            a file is made.
        MismatchError
            If the ranks save different things, or different copies of a tensor.
        CheckpointError
            If a file cannot be written. Complete checkpoints are as before. With ``asynchronous`` a later
            call raises it.
        """
        self._call = "Checkpoints.save"
        self._compared()
        home = self._machine
        with self._together() as facts:
            check_integers("Checkpoints.save", 0, ConfigurationError, step=step)
            main = objects.main_model(state)
            held = objects.Objects(state, main, scattered)
            forms = held.forms()
            facts |= {"step": step, "devices of tensors": sorted(held.devices)}
        path = files.step_folder(self.folder, step)
        # Two jobs of one step would write to the same files.
        while len(self._jobs) >= _UNDER_WAY or any(job.path == path for job in self._jobs):
            self._complete()
        words = {"step": step, "main": main, "forms": forms, "kinds": held.kinds}
        generators = objects.forms_of(objects.generators_of(held.devices))
        # Alike on all ranks, or raises on all of them.
        one = objects.merged(gather_words(home.segments, words, self._call))
        of_ranks = gather_words(home.segments, generators, self._call)
        kinds = {name: (kind, tuple(shape)) for name, (kind, shape) in one["kinds"].items()}
        held.lay_out(one["forms"])
        head, items = planned(kinds, step)
        together = self._compared_holdings(items, held)
        body = {
            "version": files.VERSION, "step": step, "ranks": home.size, "main": main, "forms": one["forms"],
            "generators": _joined(list(of_ranks.values())), **files.described(head, items),
        }  # fmt: skip
        for item in body["items"]:
            # Its checksum follows.
            item.append(f"{0:016x}")
        self._begin(path, head, body)
        mine = chain.from_iterable(each.share(home.rank) for each in together)
        self._write(path, body, files.cut_out(held.tensors, mine))
        return path

    def _compared_holdings(self, items: list[Item], held: objects.Objects) -> list[Holding]:
        # Parts of all items by the ranks that hold them. Raises on all ranks if one lacks a tensor, or copies
        # differ: ranks that hold the same parts write some bytes each, of different copies a mixture. A
        # digest of each holding travels, and those of its tensors only to name the first one that differs.
        tensors, parts = held.tensors, list(self._parts(items, held))
        with self._together():
            if lacking := [p.item.name for p, _ in parts if not p.box.empty and p.item.name not in tensors]:
                raise MismatchError(f"checkpoint: this rank has no {lacking[0]!r}, which other ranks have")
        found = holdings(parts)
        # Of a tensor on a device this needs memory there.
        with self._together():
            prints = {
                str(each.ranks): [(part.item.name, _digest(part.item.name, tensors)) for part in each.parts]
                for each in found
                if len(each.ranks) > 1
            }
        digests = {key: files.digest(json.dumps(pairs).encode()) for key, pairs in prints.items()}
        every, first = gather_words(self._machine.segments, digests, self._call).values(), dict[str, str]()
        if any(first.setdefault(key, word) != word for words in every for key, word in words.items()):
            advice = "a checkpoint has one copy of it: make them equal, such as by a broadcast"
            with self._together(advice=advice) as facts:
                for key, pairs in prints.items():
                    facts |= {f"{name!r}, which ranks {key} hold": word for name, word in pairs}
        return found

    def _begin(self, path: Path, head: bytes, body: dict[str, Any]) -> None:
        # The first rank makes the directory; before the first one, it deletes what killed jobs have left.
        with self._together():
            if self._first:
                if not self._tidy:
                    files.tidy(self.folder)
                files.begin(path, head, body)
        self._tidy = True

    def _write(self, path: Path, body: dict[str, Any], pieces: Iterator[Piece]) -> None:
        # This rank's pieces: at once, or copies of them by the thread.
        if not self._asynchronous:
            self._jobs.append(_Job(path, body, partial(files.write, path, pieces)))
            self._complete()
            return
        # The next step may change the tensors as soon as this returns.
        copies = [
            (part, first, torch.from_numpy(self._pool.array(elements.shape, np.uint8)).copy_(elements))
            for part, first, elements in pieces
        ]
        sums = self._thread.submit(files.write, path, copies)
        self._jobs.append(_Job(path, body, sums.result, sums.done))

    def _complete(self) -> None:
        # Waits for the oldest job, and publishes it, or raises its error on all ranks. The sums of the parts
        # are summed over the ranks, and only then is there a manifest: without it the directory counts for
        # nothing.
        job = self._jobs.popleft()
        try:
            with self._together():
                sums = job.written()
            items = job.body["items"]
            for item, total in zip(items, self._summed([sums[name] for name, *_ in items]), strict=True):
                item[-1] = f"{total:016x}"
            with self._together():
                if self._deletion is not None:
                    wait([self._deletion])
                if self._first:
                    files.publish(job.path, job.body, self._at)
            self._at = int(job.body["step"])
        except Exception:
            with self._together():
                if self._first:
                    files.drop(job.path)
            raise
        self._wait_for_deletion()
        if self._first:
            self._deletion = self._thread.submit(files.delete_old, job.path, self._keep)

    def _wait_for_deletion(self) -> None:
        # Its error is raised on all ranks.
        deletion, self._deletion = self._deletion, None
        with self._together():
            if deletion is not None:
                deletion.result()

    def _summed(self, numbers: Sequence[int]) -> list[int]:
        # Sums over the ranks, modulo 2^64.
        ranks = self._machine.ranks
        total = Allreduce(self._machine.segments, ranks, len(numbers), np.uint64, "sum", self._call)
        with closing(total):
            return [int(number) for number in total(np.array(numbers, np.uint64))]

    def restore(
        self, state: MutableMapping[str, Any], *, step: int | None = None, generators: bool = True
    ) -> int:
        """Restore the newest complete checkpoint, or that of a step; returns its step, 0 if there is none.

        The job may have another number of ranks than the one that saved, other partitions, or plain modules.
        Every byte of the file is read and checked by one rank before an object is changed, and then travels
        to the others through segments. Tensors are copied into existing ones, and numbers, strings and dicts
        of ``state`` are replaced. All stay on their devices, which may be others than those of the job that
        saved. What ``state`` lacks is left out.

        ``generators`` are restored too. One that differed between ranks, for want of a seed, is restored if
        the number of ranks is the same. On another number those of Python and numpy stay as they are, and
        ``UnsupportedError`` is raised for that of torch.

        Raises
        ------
        CheckpointError
            If a file is damaged, of a newer version or of another model, or cannot be read, or an object
            refuses its state. The file, the keys or the tensor are named, and the checkpoint before. Nothing
            has been changed.
        ShapeError
            If shapes or dtypes of tensors differ.
        """
        self.wait()
        self._call = "Checkpoints.restore"
        self._compared()
        with self._together() as facts:
            facts |= {"step": step, "generators": generators}
        saved = self._opened(step)
        if saved is None:
            return 0
        body = saved.body
        with self._together() as facts, files.named(f"checkpoint {saved.path}"):
            held = objects.Objects(state, body["main"], scattered)
            facts["names of the state"] = sorted(state)
            place, size = self._machine.ranks.index(self._machine.rank), self._machine.size
            wanted = held.wanted(body["forms"], saved.kinds())
            own_generators = objects.generators_of(held.devices) if generators else {}
            drawn = objects.drawn(own_generators, body["generators"], place, size)
            items, own = saved.items(wanted), held.in_place()
            tensors = {i.name: held.blank(i) for i in items if own.get(i.name) is None}
        tensors |= {name: x for name, x in own.items() if x is not None}
        shares, in_place = self._read(saved, items, held, own, tensors)
        self._pass_on(shares, tensors)
        with files.named(f"checkpoint {saved.path}"):
            held.load(body["forms"], tensors, self._together, lambda: self._pass_on(in_place, tensors))
        objects.set_generators(own_generators, drawn)
        self._at = int(body["step"])
        return self._at

    def _opened(self, step: int | None) -> Saved | None:
        # The manifest, which one rank reads, and which then travels as a tensor of bytes: it may have
        # megabytes. Two ranks that looked into the folder themselves might find different newest checkpoints.
        home, text = self._machine, b""
        with self._together():
            if self._first:
                found = files.complete(self.folder, step)
                if step is not None:
                    # Its error names the directory.
                    found.append(files.step_folder(self.folder, step))
                saved = files.opened(found[0]) if found else Saved(self.folder, {})
                text = json.dumps([str(saved.path), saved.body, saved.others]).encode()
        nbytes = gather_words(home.segments, len(text), self._call)[home.ranks[0]]
        vector = torch.zeros(nbytes, dtype=torch.uint8)
        if self._first:
            vector.numpy()[:] = np.frombuffer(text, np.uint8)
        broadcast_from_first(home, home.ranks, [vector], self._call)
        path, body, others = json.loads(vector.numpy().tobytes())
        return Saved(Path(path), body, tuple(others)) if body else None

    def _parts(self, items: Iterable[Item], held: objects.Objects) -> Iterator[tuple[Part, tuple[int, ...]]]:
        # This rank's part of each item, and the ranks that hold it.
        for item in items:
            layout = held.layouts.get(item.name)
            ranks = self._machine.ranks if layout is None else layout.holders(self._machine.rank)
            yield held.part(item), tuple(sorted(ranks))

    def _read(
        self,
        saved: Saved,
        items: list[Item],
        held: objects.Objects,
        in_place: Container[str],
        tensors: dict[str, torch.Tensor],
    ) -> tuple[list[_Share], list[_Share]]:
        # Reads each byte on one rank, and checks the sums of all. What several ranks hold is in memory of its
        # own then, a share on each of them; what one rank holds is in its tensor, which is none of an object.
        # The second list is of tensors ``in_place``, those of the user's objects.
        shares, pieces = (list[_Share](), list[_Share]()), list[Iterator[Piece]]()
        for placed, some in enumerate(shares):
            parts = self._parts([item for item in items if (item.name in in_place) == placed], held)
            for holding in holdings(parts):
                mine = holding.share(self._machine.rank)
                if len(holding.ranks) == 1 and not placed:
                    pieces.append(files.cut_out(tensors, mine))
                    continue
                # numpy asks the system for huge pages, whose first use takes a quarter of the time.
                some.append((holding, torch.from_numpy(np.empty(holding.share_nbytes, np.uint8))))
                pieces.append(files.laid_out(some[-1][1], mine))
        found, advice = Counter[str](), "is the folder on a disk that all hosts share?"
        with self._together(), files.explained("reading", saved.data, advice):
            found = files.read(saved.data, chain.from_iterable(pieces))
        names = [item.name for item in items]
        saved.check_sums(dict(zip(names, self._summed([found[name] for name in names]), strict=True)))
        return shares

    def _pass_on(self, shares: list[_Share], tensors: dict[str, torch.Tensor]) -> None:
        # Fills tensors by the shares of all ranks that hold them, slice by slice. In each slice every rank
        # gives the next bytes of its share, and gets those of all others: all ranks send and receive all the
        # time, and the segment has to hold one slice of each.
        for holding, memory in shares:
            flat = {p.item.name: flat_bytes(tensors[p.item.name]) for p in holding.parts}
            ranks, nbytes = holding.ranks, min(_SLICE_NBYTES, holding.share_nbytes)
            passes = Allgather(self._machine.segments, ranks, nbytes, np.uint8, self._call)
            with closing(passes):
                for begin in range(0, holding.share_nbytes, nbytes):
                    mine = memory[begin : begin + nbytes]
                    as_tensor(passes.active)[: mine.numel()] = mine
                    passes.start()
                    found = as_tensor(passes.wait())
                    for number, rank in enumerate(ranks):
                        shown = found[number * nbytes : (number + 1) * nbytes]
                        some = holding.share(rank, begin, begin + nbytes)
                        for part, first, elements in files.laid_out(shown, some):
                            at = first * part.item.dtype.itemsize
                            flat[part.item.name][at : at + elements.numel()] = elements

    def _together(self, **words: Any) -> AbstractContextManager[dict[str, Any]]:
        # Local work, whose error on one rank raises on all ranks.
        return together(self._machine, self._machine.ranks, self._call, failed=CheckpointError, **words)


def _signals(given: Any) -> tuple[signal.Signals, ...]:
    what = f"Checkpoints: stop_on is a signal or several, such as [signal.SIGUSR1], got {given!r}"
    with told(ConfigurationError, what):
        return tuple(map(signal.Signals, [given] if isinstance(given, int) else given))

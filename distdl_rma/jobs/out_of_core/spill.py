"""Tensors that autograd saves for the backward wait on disk, and are read ahead of it.

What a step does with the activations of four layers, and what of them is in memory where the disk keeps up::

    forward      save 1    save 2    save 3    save 4   | backward    4         3         2         1
    thread           write 1   write 2   write 3   write 4 | read 3       read 2    read 1
    in memory    1         2         3         4        |             4 3       3 2       2 1       1

torch calls ``_pack`` where it would keep a tensor, and ``_unpack`` where it needs it. Several saved tensors
may be views of one memory, as the input of one layer is the output of another, so that three things are kept
apart::

    _Saved, _Saved    what torch holds: shape, strides, where it begins in its memory
         _Piece       the bytes of one memory, which are on disk once
        Region        where these are in the file

The order of the backward is not known, only guessed: the reverse of that of the forward. A wrong guess costs
time and changes nothing: what was not read ahead is read when it is needed.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from distdl_rma.errors import DataError, ProtocolError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.out_of_core.scratch import Region, Scratch
from distdl_rma.layers.ops.core.allocator import freed_at_once
from distdl_rma.layers.ops.core.autograd import keeps_values
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.staging import Descent
from distdl_rma.segments.consensus import together
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.options import parse_size
from distdl_rma.segments.transport.pool import Pool

# What the backward needs next is in memory up to this many bytes; one larger tensor is read ahead alone.
_AHEAD_NBYTES = 1 << 26
# Memory for what is read, kept for the next tensor of its size: new pages cost several times as much as the
# copy of their data.
_IDLE_NBYTES = 1 << 26
# How many saved tensors back the next ones are looked for.
_AHEAD_COUNT = 256
# Memory begins at such addresses; kernels compute the same on a tensor that lies alike.
_ALIGNED = 64


class spill:  # noqa: N801
    """Context in which large tensors that autograd saves for the backward go to disk.

    A step with it has the same losses and gradients, bit for bit, and needs less memory::

        disk = spill("/scratch", above="1MiB")
        for x, y in loader:
            with disk:
                loss = model(x, y)
                loss.backward()

    Tensors are written by a thread while the forward goes on. When the backward begins, they are read ahead
    in the reverse order. Parameters stay in memory, and so does what is smaller than ``above``. Each memory
    is written once, whatever views of it are saved; one that is still alive in the backward is not read. The
    file has no name: nothing stays of it, however the process ends. It is the memory of this rank alone, so
    ``folder`` lies on a disk of its own host.

    Tensors of a device are copied to the host first, and come back to the device in the backward. So the
    device has, of what is saved, what is smaller or needed at once.

    It goes with models of plain tensors and with distributed ones, with ``torch.utils.checkpoint``, whose
    inputs are on disk then, with ``retain_graph`` and ``create_graph``. The backward may also run behind the
    context. An object of this class can be entered again, but not twice at a time.

    Building it, and leaving the context without an exception, are collective over the ranks of ``machine``:
    blocking, an error of one rank is raised on all.

    Parameters
    ----------
    folder
        An existing directory on a disk of this host; ranks may name different ones.
    above
        Tensors of more bytes than this go to disk, a number or text such as ``"1MiB"``.
    quota
        Largest number of bytes on disk for each rank, likewise; None: the free space.
    machine
        The ranks that fail together, as a machine or one of its partitions. None: all ranks of COMM_WORLD's
        machine, or this process alone if there is none.

    Raises
    ------
    ConfigurationError
        If a size is none.
    DataError
        If no file can be made in the folder, the disk is full, or it cannot be written or read. A full disk
        is raised where the forward meets it, if no other ranks work with this one. Otherwise its tensors stay
        in memory, so that no rank waits for this one, and all ranks raise when they leave the context; their
        results are right but for that. What was written is freed then: gradients cannot be computed any more.
        A read that fails raises in the backward, on the other ranks as ``PeerFailedError``.
    ProtocolError
        If the context is entered twice at a time.
    RuntimeError
        Of torch, in the backward, if a saved tensor was changed in place meanwhile: as without this context.

    Warns
    -----
    RuntimeWarning
        If the folder is in memory (tmpfs, ramfs): this saves no memory.

    Examples
    --------
    >>> model = distribute(nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU()), {"H": -1})
    >>> disk = spill(".", above="4KiB")  # a folder on a disk of this host
    >>> with disk:
    ...     model(torch.rand(1, 1, 64, 64)).mean().backward()  # as without it, but in less memory
    >>> model[0].weight.grad.shape
    torch.Size([8, 1, 3, 3])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        above: int | str = "1MiB",
        quota: int | str | None = None,
        machine: Partition | Machine | None = None,
    ) -> None:
        self._given = None if machine is None else Machine.of(machine)
        self._arguments = folder, quota
        self._entered: ExitStack | None = None
        self._scratch: Scratch | None = None
        # Of the current step: the first error of this rank that no other one knows yet. Raised in the middle
        # of the forward, it would leave the others waiting for this rank's halo.
        self._problem: DataError | None = None
        # Pieces on disk by the address of their storage, and saved tensors by their number.
        self._pieces: WeakValueDictionary[int, _Piece] = WeakValueDictionary()
        self._saved: WeakValueDictionary[int, _Saved] = WeakValueDictionary()
        self._numbers = count()
        # Pieces in memory that the backward needs next. The lock guards it, and what pieces have in memory.
        self._held: list[ref[_Piece]] = []
        self._lock, self._pool = threading.Lock(), Pool(_IDLE_NBYTES)
        with self._together():
            self._above = parse_size(above, "the size above which tensors are spilled")
            self._scratch = Scratch(folder, quota)

    @property
    def written_nbytes(self) -> int:
        """Bytes that this rank has written since it was built, or since a step failed; local."""
        return 0 if self._scratch is None else self._scratch.written_nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes that this rank has read in the same time; local."""
        return 0 if self._scratch is None else self._scratch.read_nbytes

    def __enter__(self) -> spill:
        if self._entered is not None:
            raise ProtocolError("spill: the context is entered already; leave it first, or build another one")
        if self._scratch is None:
            self._reopen()
        self._entered = ExitStack()
        self._entered.enter_context(freed_at_once(self._above))
        self._entered.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None
        if self._scratch is not None:
            self._scratch.flush()
            self._problem = self._problem or self._scratch.error
        if error is not None:
            # The peers are elsewhere, or raise as well.
            if self._problem is not None:
                if error is not self._problem:
                    error.add_note(f"before that: {self._problem}")
                self._give_up()
            return
        try:
            with self._together():
                if self._problem is not None:
                    raise self._problem
        except DataError:
            self._give_up()
            raise

    def _peers(self) -> Machine | None:
        machine = Machine.known() if self._given is None else self._given
        return None if machine is None or machine.closed or machine.size == 1 else machine

    def _together(self) -> AbstractContextManager[object]:
        # Local work, whose error on one rank raises on all ranks.
        machine = self._peers()
        return nullcontext() if machine is None else together(machine, machine.ranks, "spill")

    def _reopen(self) -> None:
        # After a failed step, also if only this rank has noticed that it failed. Where others take part, an
        # error waits until the end of the context, at which all ranks meet.
        try:
            self._scratch = Scratch(*self._arguments)
        except DataError as error:
            if self._peers() is None:
                raise
            self._problem = error

    def _give_up(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = self._problem = None

    # Hooks of torch, which turns gradients off in them.

    @keeps_values
    def _pack(self, x: torch.Tensor) -> _Kept | _Saved | _Split:
        if type(x) is SplitTensor:
            # An argument of a checkpoint, or saved by a user's function.
            return _Split(self._pack_plain(x._local.detach()), x._layout)
        return self._pack_plain(x)

    def _pack_plain(self, x: torch.Tensor) -> _Kept | _Saved:
        scratch = self._scratch
        if scratch is None or not _can_wait(x):
            return _Kept.of(x)
        storage, size = x.untyped_storage(), x.itemsize
        begin = int(x.storage_offset()) * size
        end = begin + size * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
        if end - begin <= self._above:
            return _Kept.of(x)
        key: int = storage._cdata
        piece = self._pieces.get(key)
        if piece is None or piece.version != x._version or not piece.begin <= begin < end <= piece.end:
            # Other parts of the same memory are likely to be saved as well.
            if 2 * (end - begin) >= storage.nbytes():
                begin, end = 0, storage.nbytes()
            begin -= begin % _ALIGNED
            part = torch.empty(0, dtype=torch.uint8, device=x.device)
            part.set_(storage, begin, (end - begin,), (1,))
            if not x.is_cpu:
                part = torch.from_numpy(Descent([part]).wait()[0])
            try:
                region = scratch.write(part)
            except DataError as error:
                if self._peers() is None:
                    raise
                self._problem = self._problem or error
                return _Kept.of(x)
            alive = StorageWeakRef(storage)
            piece = _Piece(scratch, region, self._pool, alive, begin, x._version, x.device)
            self._pieces[key] = piece
        number = next(self._numbers)
        saved = self._saved[number] = _Saved(x, piece, number)
        return saved

    def _unpack(self, packed: _Kept | _Saved | _Split) -> torch.Tensor:
        if isinstance(packed, _Split):
            return SplitTensor(self._unpack(packed.block), packed.layout)
        if isinstance(packed, _Kept):
            _check_version(packed.tensor, packed.version, packed.tensor)
            return packed.tensor
        _check_version(packed.guard, packed.version, packed)
        try:
            with self._lock:
                return packed.tensor(*self._in_memory(packed))
        except DataError as error:
            machine = self._peers()
            if machine is not None:
                machine.segments.announce_error(error)
            raise

    def _in_memory(self, saved: _Saved) -> tuple[torch.UntypedStorage, int]:
        """The storage of a saved tensor, and where that begins; begins to read the next ones before."""
        wanted, piece = self._wanted_after(saved), saved.piece
        found = piece.alive()
        for each in wanted:
            each.prefetch()
        if found is None:
            found = piece.read()
        for other in (*(held() for held in self._held), piece):
            if other is not None and other not in wanted:
                other.drop()
        self._held = [*map(ref, wanted)]
        return found

    def _wanted_after(self, saved: _Saved) -> dict[_Piece, None]:
        # The backward needs saved tensors in the reverse of the order in which they were saved.
        wanted: dict[_Piece, None] = {}
        nbytes = 0
        for number in range(saved.number - 1, max(saved.number - _AHEAD_COUNT, 0) - 1, -1):
            other = self._saved.get(number)
            if other is None or other.piece in wanted:
                continue
            nbytes += other.piece.end - other.piece.begin
            if wanted and nbytes > _AHEAD_NBYTES:
                break
            wanted[other.piece] = None
        return wanted


class _Kept(NamedTuple):
    """A saved tensor that stays in memory."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, x: torch.Tensor) -> _Kept:
        # A result would refer to its own node of the graph.
        return cls(x if x.requires_grad and x.is_leaf else x.detach(), x._version)


class _Split(NamedTuple):
    """A saved split tensor: its block, and where that belongs."""

    block: _Kept | _Saved
    layout: Decomposition


class _Piece:
    """Bytes of one storage, on disk; saved tensors share it, and the last one frees it.

    The bytes may be in memory too, in the storage that was written or in one that was read, as long as
    someone has a tensor of it. References to both are weak, and are asked before the disk is. ``_buffer``
    keeps what was read for saved tensors to come, from ``prefetch`` or ``read`` until ``drop``.
    """

    def __init__(
        self,
        scratch: Scratch,
        region: Region,
        pool: Pool,
        origin: StorageWeakRef,
        begin: int,
        version: int,
        device: torch.device,
    ) -> None:
        self._scratch, self._region, self._pool, self._device = scratch, region, pool, device
        self.begin, self.end, self.version = begin, begin + region.nbytes, version
        # As long as this refers to the storage, no other one has its address.
        self._origin = origin
        # Memory of the same bytes that was read, if it is alive, and kept alive for saved tensors to come.
        self._loaded: StorageWeakRef | None = None
        self._buffer: torch.Tensor | None = None

    def __del__(self) -> None:
        self._scratch.free(self._region)

    def alive(self) -> tuple[torch.UntypedStorage, int] | None:
        """A storage that has the bytes, and which byte it begins with; None if they are on disk only."""
        for reference, begin in ((self._origin, 0), (self._loaded, self.begin)):
            if reference is not None:
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    return storage, begin
        return None

    def prefetch(self) -> None:
        """Begin to read the bytes, unless they are in memory, or will be."""
        if self._buffer is None and self.alive() is None:
            self._buffer = torch.from_numpy(self._pool.array((self._region.nbytes,), np.uint8))
            self._scratch.prefetch(self._region, self._buffer)

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """The bytes in memory, kept until ``drop``."""
        if self._buffer is None:
            self._buffer = torch.from_numpy(self._pool.array((self._region.nbytes,), np.uint8))
        self._scratch.read(self._region, self._buffer)
        # Of memory of a device, the host's is needed no longer.
        self._buffer = self._buffer.to(self._device)
        storage = self._buffer.untyped_storage()
        self._loaded = StorageWeakRef(storage)
        return storage, self.begin

    def drop(self) -> None:
        """Keep the bytes in memory no longer."""
        if self._buffer is not None:
            self._scratch.cancel(self._region)
            self._buffer = None


class _Saved:
    """A saved tensor on disk: what makes it again out of the bytes of its piece."""

    def __init__(self, x: torch.Tensor, piece: _Piece, number: int) -> None:
        self.piece, self.number = piece, number
        self.dtype, self.shape, self.strides, self.offset = x.dtype, x.shape, x.stride(), x.storage_offset()
        self.marks = x.is_conj(), x.is_neg()
        # A tensor without memory, which counts the changes of x.
        self.version, self.guard = x._version, x.detach()
        self.guard.data = x.new_empty(0)

    def tensor(self, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
        """The tensor in a storage that begins with byte ``begin`` of its own."""
        offset = self.offset - begin // self.dtype.itemsize
        x = torch.empty(0, dtype=self.dtype, device=storage.device)
        x.set_(storage, offset, self.shape, self.strides)
        conjugated, negated = self.marks
        x = x.conj() if conjugated else x
        return torch._neg_view(x) if negated else x


def _can_wait(x: torch.Tensor) -> bool:
    """Whether the memory of a tensor is an ordinary one that may become free."""
    base = x if x._base is None else x._base
    parameter = isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)
    stored = torch._C._has_storage(x) and not x.is_meta
    ordinary = type(x) is torch.Tensor and x.layout is torch.strided and stored
    return ordinary and not parameter and not x.is_quantized and x.numel() > 0


def _check_version(counted: torch.Tensor, version: int, x: torch.Tensor | _Saved) -> None:
    # Torch checks this only without hooks. The bytes on disk are those before the change: a gradient of them
    # would be right, and differ from what the program gives without this context, which is an error.
    if counted._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" a saved tensor of shape {tuple(x.shape)} and {x.dtype} is at version {counted._version},"
            f" expected version {version}; change a copy of it"
        )

"""Blocks of virtual ranks that wait: some in memory, the others on disk until the rank goes on."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from distdl_rma.dtypes import memory_moves
from distdl_rma.ops.core.result_memory import unpooled
from distdl_rma.out_of_core.scratch import Region, Scratch
from distdl_rma.split import tensor as split_tensor
from distdl_rma.split.calls.site import module_path
from distdl_rma.split.tensor import SplitTensor

# Smaller blocks stay in memory.
_SMALLEST_NBYTES = 1 << 16


class _Page:
    """Memory of one or more blocks: here, on its way to the disk, on disk, or on its way back."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.nbytes = storage, storage.nbytes()
        self.region: Region | None = None
        # Whether the memory has been given back; and where a prefetch puts the bytes.
        self.out = False
        self.into: torch.Tensor | None = None

    @property
    def bytes(self) -> torch.Tensor:
        """The memory, as a tensor of its own: an array of the storage would keep it from being resized."""
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.storage.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8)

    def make_room(self) -> torch.Tensor:
        """Allocate the memory again, for reading."""
        self.storage.resize_(self.nbytes)
        self.out = False
        return self.bytes


class Pages:
    """Keeper of virtual ranks that gives the memory of waiting ranks back, after writing it to disk.

    Blocks of split tensors of a rank are its pages. They move as whole storages, which are resized in place,
    so that all tensors and views of them stay valid; a rank that waits uses none. An operation that waits may
    have numpy arrays of results that are no split tensors yet, which never move.

    All ranks do the same in the same order, one after the other. So the rank that waits last is the one that
    is needed last, and its blocks are written first; the blocks of the rank behind it are read ahead.

    Parameters
    ----------
    limit
        Bytes of blocks of waiting ranks that stay in memory.
    scratch
        Makes the file for the others, when the first one is written.
    fixed
        Tensors whose memory never moves, such as parameters, of which blocks may be views.
    waits
        Called with the rank and the path of the module when a rank begins to wait.
    """

    def __init__(
        self,
        limit: int,
        scratch: Callable[[], Scratch],
        fixed: Iterable[torch.Tensor] = (),
        waits: Callable[[int, str], object] = lambda rank, path: None,
    ) -> None:
        self._limit, self._make_scratch, self._waits = limit, scratch, waits
        self._fixed = {x.untyped_storage()._cdata for x in fixed}
        self._scratch: Scratch | None = None
        # The rank that runs, and the tensors that each rank has made: split ones, and results of operations.
        self._running: int | None = None
        self._made: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        # Pages of the ranks that wait, and those whose bytes are being written.
        self._waiting: dict[int, list[_Page]] = {}
        self._leaving: list[_Page] = []
        #: Bytes of blocks of waiting ranks, their maximum, and the part that is in memory.
        self.held_nbytes = self.peak_nbytes = self.resident_nbytes = 0

    @property
    def written_nbytes(self) -> int:
        """Bytes written to disk so far."""
        return 0 if self._scratch is None else self._scratch.written_nbytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which new split tensors are noted; it ends with the file."""
        split_tensor.MADE.append(self._note)
        try:
            with memory_moves(), unpooled(self._note):
                yield
        finally:
            split_tensor.MADE.remove(self._note)
            self._waiting.clear()
            self._leaving.clear()
            if self._scratch is not None:
                self._scratch.close()

    def begin(self, rank: int) -> None:
        """A rank begins; what it does before is no wait of its model."""
        self._running, self._made[rank] = rank, []

    def end(self, rank: int) -> None:
        """A rank ends, and needs no memory any more."""
        self._running = None
        self._made.pop(rank, None)

    def wait_begun(self, rank: int) -> None:
        """Note the blocks of a rank that waits, and write some to disk if there are too many."""
        if rank not in self._made or rank in self._waiting:
            return
        self._waits(rank, module_path())
        self._running = None
        pages = self._waiting[rank] = self._pages_of(rank)
        nbytes = sum(page.nbytes for page in pages)
        self.held_nbytes += nbytes
        self.resident_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)
        self._give_back()
        if self.resident_nbytes > self._limit:
            self._write(rank)

    def wait_ended(self, rank: int) -> None:
        """Bring the blocks of a rank back before it goes on, and begin to read those of the next one."""
        if rank not in self._made:
            return
        self._running = rank
        pages = self._waiting.pop(rank, None)
        if pages is None:
            return
        nbytes = sum(page.nbytes for page in pages)
        self.held_nbytes -= nbytes
        for page in pages:
            self._bring_back(page)
        self.resident_nbytes -= nbytes
        self._read_ahead(rank)

    def _note(self, made: torch.Tensor) -> None:
        if self._running is not None:
            self._made[self._running].append(weakref.ref(made))

    def _pages_of(self, rank: int) -> list[_Page]:
        alive = [(ref, x) for ref in self._made[rank] if (x := ref()) is not None]
        self._made[rank] = [ref for ref, _ in alive]
        storages: dict[int, torch.UntypedStorage] = {}
        for _, x in alive:
            storage = (x._local if isinstance(x, SplitTensor) else x).untyped_storage()
            if storage.nbytes() >= _SMALLEST_NBYTES and storage.resizable():
                storages[storage._cdata] = storage
        return [_Page(storage) for key, storage in storages.items() if key not in self._fixed]

    def _order(self, rank: int) -> list[int]:
        # Waiting ranks by when they are needed: those behind this one, then from the first on.
        return sorted(self._waiting, key=lambda each: (each <= rank, each))

    def _write(self, rank: int) -> None:
        # Begins to write the blocks that are needed last, until the others are few enough.
        if self._scratch is None:
            self._scratch = self._make_scratch()
        for each in reversed(self._order(rank)):
            for page in self._waiting[each]:
                if self.resident_nbytes - sum(p.nbytes for p in self._leaving) <= self._limit:
                    return
                if not page.out and page.region is None:
                    page.region = self._scratch.write(page.bytes)
                    self._leaving.append(page)

    def _give_back(self) -> None:
        # The bytes that were written while another rank computed: their memory is free now.
        leaving, self._leaving = self._leaving, []
        for page in leaving:
            if self._scratch is not None and page.region is not None:
                self._scratch.wait(page.region)
                page.storage.resize_(0)
                page.out = True
                self.resident_nbytes -= page.nbytes

    def _bring_back(self, page: _Page) -> None:
        region, self._leaving = page.region, [each for each in self._leaving if each is not page]
        if region is None or self._scratch is None:
            return
        if page.out:
            page.into = page.make_room()
            self.resident_nbytes += page.nbytes
        if page.into is not None:
            self._scratch.read(region, page.into)
        else:
            # It has not left yet.
            self._scratch.wait(region)
        self._scratch.free(region)
        page.region = page.into = None

    def _read_ahead(self, rank: int) -> None:
        following = next(iter(self._order(rank)), None)
        for page in self._waiting.get(-1 if following is None else following, []):
            if page.out and page.region is not None and self._scratch is not None:
                page.into = page.make_room()
                self.resident_nbytes += page.nbytes
                self._scratch.prefetch(page.region, page.into)

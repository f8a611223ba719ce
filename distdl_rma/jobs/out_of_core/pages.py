"""What virtual ranks that wait need later: blocks and messages, some in memory, the others on disk.

Five slabs of an image, each a rank. All have come to the same function, and take their turns in order::

    rank     0          1          2          3          4
    is       waiting    running    next       waiting    waiting
    blocks   leave      in memory  come back  on disk    on disk
             for disk              meanwhile

Rank 0 has just had its turn and has the longest time until its next one: its blocks are written first. Those
of rank 2 are read while rank 1 computes. What waiting ranks have in memory stays below a limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from distdl_rma.jobs.out_of_core.live_memory import LiveMemory
from distdl_rma.jobs.out_of_core.scratch import Region, Scratch
from distdl_rma.layers.dtypes import SHOWN, memory_moves
from distdl_rma.layers.ops.core.allocator import free_buffers
from distdl_rma.layers.ops.core.result_memory import idle_memory
from distdl_rma.layers.split.calls.site import module_path
from distdl_rma.segments.channel import Array
from distdl_rma.segments.mailbox import Mailbox, Parcel

# Smaller blocks stay in memory, and smaller parts of messages, of which there are many more.
_SMALLEST_NBYTES, _SMALLEST_PARCEL_NBYTES = 1 << 16, 1 << 12


class _Page:
    """Memory that waits: here, on its way to the disk, or ``out`` on disk.

    Where it is, and what says so::

        here              region None
        leaving           region is being written, the memory is still valid
        out               region has the bytes, the memory is gone
        being read        region reads into memory that has been made again (``region.into``)

    Only :class:`Pages` moves a page from one line to the next, and counts the bytes that are in memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.region: Region | None = None
        self.out = False

    @property
    def bytes(self) -> torch.Tensor:
        """The memory, as a tensor."""
        raise NotImplementedError

    def leave(self, scratch: Scratch) -> None:
        """Free the memory, whose bytes are in the region."""
        raise NotImplementedError


class _Block(_Page):
    """Memory of one or more tensors of a rank, which stay valid when it comes back.

    The storage is resized to nothing and back. Tensors refer to their storage and not to its memory, so that
    no tensor has to be found or changed.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage.nbytes())
        self.storage = storage

    @property
    def bytes(self) -> torch.Tensor:
        # A tensor of its own: an array of the storage would keep it from being resized.
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.storage.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8)

    def leave(self, scratch: Scratch) -> None:
        self.storage.resize_(0)

    def make_room(self) -> torch.Tensor:
        """Allocate the memory again, for reading."""
        self.storage.resize_(self.nbytes)
        self.out = False
        return self.bytes

    def end_wait(self) -> None:
        """Give the rank its memory, which is here."""


class _BlockOfDevice(_Block):
    """Memory of a device, which is in the host's while its rank waits, and goes to the disk from there.

    Not pinned: torch rounds pinned memory up, and keeps it when it is free.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self.make_room().copy_(self._there())
        storage.resize_(0)

    @property
    def bytes(self) -> torch.Tensor:
        return self._here

    def leave(self, scratch: Scratch) -> None:
        del self._here

    def make_room(self) -> torch.Tensor:
        # By numpy, so that nobody takes it for memory that the rank has made.
        self._here, self.out = torch.from_numpy(np.empty(self.nbytes, np.uint8)), False
        return self._here

    def end_wait(self) -> None:
        self.storage.resize_(self.nbytes)
        self._there().copy_(self._here)
        del self._here

    def _there(self) -> torch.Tensor:
        place = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return place.set_(cast(Any, self.storage), 0, (self.nbytes,), (1,))


class _Mail(_Page):
    """A part of a message, which comes back at each use in new memory."""

    def __init__(self, parcel: Parcel, receiver: int) -> None:
        super().__init__(parcel.nbytes)
        self.receiver, self._parcel = receiver, parcel
        self._shape, self._dtype = parcel.array.shape, parcel.array.dtype

    @property
    def bytes(self) -> torch.Tensor:
        return _bytes_of(self._parcel.array)

    def leave(self, scratch: Scratch) -> None:
        self._parcel.leave(lambda: self._fetched(scratch))

    def _fetched(self, scratch: Scratch) -> Array:
        array = np.empty(self._shape, self._dtype)
        if self.region is not None:
            scratch.read(self.region, _bytes_of(array))
        return array


class Pages:
    """Keeper of virtual ranks and of their messages, of which at most ``limit`` bytes wait in memory.

    All memory that functions of torch make while a rank runs is pages of the rank when it waits. They move as
    whole storages, which are resized in place, so that all tensors and views of them stay valid; a rank that
    waits uses none. Memory with a numpy array of it never moves. What ranks send each other waits within the
    same limit.

    All ranks do the same in the same order, one after the other. So the rank that waits last is the one that
    is needed last, and its memory is written first. Memory of the rank behind the one that runs is read
    ahead, as far as the limit allows.

    Parameters
    ----------
    limit
        Bytes of waiting ranks and of messages that stay in memory.
    scratch
        Makes the file for the others, when the first one is written.
    waits
        Called with the rank and the path of the module when a rank begins to wait.
    moves
        Whether memory of ranks is moved. If not, it is expected that none waits before it ends, and results
        use memory again: that of ``idle_nbytes`` bytes is kept for the next ones.
    counts
        Whether to count the memory of each rank while it runs, as ``peaks``.
    """

    def __init__(
        self,
        limit: int,
        scratch: Callable[[], Scratch],
        waits: Callable[[int, str], object] = lambda rank, path: None,
        *,
        moves: bool = True,
        counts: bool = False,
        idle_nbytes: int = 0,
    ) -> None:
        self._limit, self._scratch, self._waits = limit, cache(scratch), waits
        self._moves, self._counts, self._idle_nbytes = moves, counts, idle_nbytes
        # The rank that runs or did so last, and what each rank has made.
        self._running = 0
        self._made: dict[int, LiveMemory | None] = {}
        # Blocks of the ranks that wait, parts of messages, and those of both that are being written.
        self._waiting: dict[int, list[_Block]] = {}
        self._mail: dict[Parcel, _Mail] = {}
        self._leaving: dict[_Page, Region] = {}
        #: Bytes of blocks of ranks that wait, and of messages, that are in memory.
        self.resident_nbytes = 0
        #: For each rank, the most that it had while it ran and has ended, and while it waited.
        self.peaks: dict[int, int] = {}
        self.held: dict[int, int] = {}

    @contextmanager
    def watching(self, mailbox: Mailbox) -> Iterator[None]:
        """Context in which memory and messages are kept; it ends with the file."""
        mailbox.keeper = self
        for address, queue in mailbox.messages.items():
            for message in queue:
                for parcel in message.parcels:
                    self.store(parcel, address.receiver)
        try:
            with memory_moves() if self._moves else nullcontext(), idle_memory(self._idle_nbytes):
                yield
        finally:
            mailbox.keeper = None
            self._waiting.clear()
            self._mail.clear()
            self._leaving.clear()
            if self._scratch.cache_info().currsize:
                self._scratch().close()

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Context of what a rank computes; what it does before and behind is no wait of its model."""
        alive = LiveMemory(self._counts) if self._moves or self._counts else None
        self._running, self._made[rank] = rank, alive
        try:
            with alive or nullcontext():
                yield
        finally:
            del self._made[rank]
            if alive is not None:
                self.peaks[rank] = alive.peak

    def wait_begun(self, rank: int) -> None:
        """Note the memory of a rank that waits, and write some to disk if there is too much."""
        if rank not in self._made or rank in self._waiting:
            return
        self._waits(rank, module_path())
        if self._moves:
            free_buffers()
        self._running = rank
        blocks = self._waiting[rank] = self._blocks_of(rank)
        nbytes = sum(block.nbytes for block in blocks)
        self.resident_nbytes += nbytes
        self.held[rank] = max(nbytes, self.held.get(rank, 0))
        self._fit()

    def wait_ended(self, rank: int) -> None:
        """Bring the memory of a rank back before it goes on, and begin to read that of the next one."""
        if rank not in self._made:
            return
        self._running = rank
        for block in self._waiting.pop(rank, []):
            self._bring_back(block)
            block.end_wait()
        self._read_ahead()

    def store(self, parcel: Parcel, receiver: int) -> None:
        """Keep a part of a message."""
        if parcel.nbytes >= _SMALLEST_PARCEL_NBYTES:
            self._mail[parcel] = _Mail(parcel, receiver)
            self.resident_nbytes += parcel.nbytes
            self._fit()

    def drop(self, parcel: Parcel) -> None:
        """Forget a part of a message."""
        page = self._mail.pop(parcel, None)
        if page is None:
            return
        if not page.out:
            self.resident_nbytes -= page.nbytes
        if page.region is not None:
            self._leaving.pop(page, None)
            self._scratch().free(page.region)

    def _blocks_of(self, rank: int) -> list[_Block]:
        alive = self._made[rank]
        if alive is None or not self._moves:
            return []
        shown, least = {each.storage for each in SHOWN}, 0 if self._counts else _SMALLEST_NBYTES
        return [
            _Block(storage) if storage.device.type == "cpu" else _BlockOfDevice(storage)
            for storage in [*alive.storages()]
            if storage.nbytes() >= least and storage.resizable() and storage._cdata not in shown
        ]

    def _after(self, rank: int) -> tuple[bool, int]:
        # Orders ranks by when they are needed: those behind the one that runs, then from the first on. It is
        # the order of turns, which is known: nothing has to be guessed from the past, as by other caches.
        return rank <= self._running, rank

    def _needed_last(self) -> Iterator[_Page]:
        # Pages in memory that are not being written.
        pages = dict[int, list[_Page]]()
        for rank, blocks in self._waiting.items():
            pages.setdefault(rank, []).extend(blocks)
        for mail in self._mail.values():
            pages.setdefault(mail.receiver, []).append(mail)
        for rank in sorted(pages, key=self._after, reverse=True):
            yield from (page for page in pages[rank] if not page.out and page not in self._leaving)

    def _fit(self) -> None:
        # Writes what is needed last, and a part of the limit more while another rank computes: the next rank
        # that waits then finds room at once, and the disk works meanwhile.
        if self.resident_nbytes <= self._limit:
            return
        scratch = self._scratch()
        enough = self.resident_nbytes - self._limit + self._limit // 4
        leaving = sum(page.nbytes for page in self._leaving)
        for page in self._needed_last():
            if leaving >= enough:
                break
            page.region = self._leaving[page] = page.region or scratch.write(page.bytes)
            leaving += page.nbytes
        while self.resident_nbytes > self._limit and self._leaving:
            page = next(iter(self._leaving))
            region = self._leaving.pop(page)
            # Perhaps it was read ahead too early.
            scratch.cancel(region)
            scratch.wait(region)
            page.leave(scratch)
            page.out = True
            self.resident_nbytes -= page.nbytes

    def _bring_back(self, block: _Block) -> None:
        # Its memory is that of the rank then.
        if not block.out:
            self.resident_nbytes -= block.nbytes
        self._leaving.pop(block, None)
        if (region := block.region) is None:
            return
        into = block.make_room() if block.out else region.into
        if into is not None:
            self._scratch().read(region, into)
        else:
            # It has not left yet.
            self._scratch().wait(region)
        self._scratch().free(region)
        block.region = None

    def _read_ahead(self) -> None:
        following = min(self._waiting, key=self._after, default=-1)
        for block in self._waiting.get(following, []):
            fits = self.resident_nbytes + block.nbytes <= self._limit
            if fits and block.out and block.region is not None:
                self.resident_nbytes += block.nbytes
                self._scratch().prefetch(block.region, block.make_room())


def _bytes_of(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))

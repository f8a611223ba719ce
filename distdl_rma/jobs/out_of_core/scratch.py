"""A scratch file: bytes of tensors on disk, written and read ahead by a thread, gone with the process.

The life of a region, for its owner and for the thread, which does one job after the other::

    owner     write        wait      prefetch   read        free
    thread          writes                reads
    bytes     in memory .......|  in the file .............|  nowhere
                       memory may go          here again      space is taken again

Of four regions in a file of eight pages, the second one was freed. The next region of two pages takes its
place; one of three pages would take these two and a page behind the end::

    page    0   1   2   3   4   5   6   7
            a   a   .   .   c   c   c   d

``free`` gives the thread no job. Finalizers call it, which may run at any allocation of any thread: also of
one that is within ``submit`` of the executor, holds its lock, and would wait for itself. So the thread looks
behind each of its jobs for what was freed.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import IO

import torch

from distdl_rma.errors import ClosedError, DataError, told
from distdl_rma.layers.dtypes import flat_bytes
from distdl_rma.layers.sources.raw import read_at, write_at
from distdl_rma.segments.machine import launched
from distdl_rma.segments.options import parse_size

# Extents begin and end at whole pages, so that no write has to read a page first, and no two regions share
# one.
_PAGE = 1 << 12
# Largest amount of memory that waits to be written, in bytes; one larger tensor may wait alone.
_IN_FLIGHT_NBYTES = 1 << 26
# A file of up to this length keeps it: its pages in the system's cache are written over, at a fraction of the
# cost of new ones.
_KEPT_NBYTES = 1 << 30
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})

# Offset in the file and length, in bytes.
Extent = tuple[int, int]
_length: Callable[[Extent], int] = itemgetter(1)


class Extents:
    """Which bytes of a file are in use; what is given back is merged and taken again.

    Free extents are sorted, do not touch each other, and none is at the end of the file: one that is shortens
    it. So the file is never longer than the most bytes that were in use at a time.

    Examples
    --------
    >>> space = Extents()
    >>> first, second = space.take(3), space.take(2)
    >>> space.give(first[0])
    >>> space.take(4), space.end  # before the second, and behind it
    ([(0, 3), (5, 1)], 6)
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[Extent] = []

    def take(self, nbytes: int) -> list[Extent]:
        """Extents of ``nbytes`` bytes together: one if that is possible, else as many as avoid growth.

        The shortest one that fits, which leaves long ones whole; else the longest one, again and again, which
        makes few extents.
        """
        taken = []
        while nbytes and self._free:
            fitting = [extent for extent in self._free if extent[1] >= nbytes]
            at, length = min(fitting, key=_length) if fitting else max(self._free, key=_length)
            self._free.remove((at, length))
            if length > nbytes:
                self.give((at + nbytes, length - nbytes))
                length = nbytes
            taken.append((at, length))
            nbytes -= length
        if nbytes:
            taken.append((self.end, nbytes))
            self.end += nbytes
        return taken

    def give(self, extent: Extent) -> None:
        """Make an extent free; free bytes at the end shorten the file."""
        (begin, length), place = extent, bisect(self._free, extent)
        end = begin + length
        if place < len(self._free) and self._free[place][0] == end:
            end += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == begin:
            place -= 1
            begin = self._free.pop(place)[0]
        if end == self.end:
            self.end = begin
        else:
            self._free.insert(place, (begin, end - begin))


class Region:
    """Where the bytes of one tensor are: in memory until they are written, then in the file.

    ``Scratch.write`` makes it. It holds no reference to its file, or a file would live as long as its
    regions, and these would live as long as the graph that a step has left behind.

    The thread sets ``_source`` to None behind the write, under the lock of the file, and wakes who waits for
    it. The owner does all else. ``free`` takes no lock, since it must never wait.
    """

    def __init__(self, source: torch.Tensor, extents: list[Extent]) -> None:
        self.nbytes = source.nbytes
        # Of the write, raised by ``wait``; the bytes then stay in memory.
        self.error: DataError | None = None
        self._extents, self._freed = extents, False
        # The bytes to write, until they are in the file.
        self._source: torch.Tensor | None = source
        # Where a prefetch puts them, and its end; None if there is none.
        self.into: torch.Tensor | None = None
        self._ahead: Future[None] | None = None


class Scratch:
    """A file without a name, in which tensors of this process wait; a thread writes and reads it.

    The file is unlinked as soon as it is open: when the process ends, however it does, nothing stays. A write
    returns at once, and keeps its tensor alive until it is written. Space of freed regions is used again, and
    the file becomes shorter when its last ones are freed, down to 1 GiB: behind the next job of the thread.

    The system's page cache holds what is not on the disk yet. It counts as free memory, and the system slows
    the writing thread down when there is too much of it. Bytes behind the end of a file that became shorter
    before the system has written them never reach the disk.

    All methods may be called from any thread, ``free`` also from a finalizer. An object of this class that is
    no longer used closes itself.

    Parameters
    ----------
    folder
        An existing directory on a disk of this host.
    quota
        Largest number of bytes in use at a time, a number or text such as ``"8GiB"``; None: the free space.

    Raises
    ------
    ConfigurationError
        If the quota is no size.
    DataError
        If no file can be made in the folder.

    Warns
    -----
    RuntimeWarning
        If the folder is in memory (tmpfs, ramfs): this saves no memory. Only the first rank warns.
    """

    def __init__(self, folder: str | os.PathLike[str], quota: int | str | None = None) -> None:
        self.folder = Path(folder)
        self.quota = None if quota is None else parse_size(quota, "the quota")
        advice = (
            "name a directory on a disk of this host that you may write to, or allow more files (ulimit -n)"
        )
        with told(DataError, f"scratch: no file can be made in {self.folder}", advice, OSError):
            # O_TMPFILE where the file system has it, else a file that is unlinked at once.
            self._opened = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        self._file = self._opened.fileno()
        #: Bytes written to the file and read from it so far, and bytes in use.
        self.written_nbytes = self.read_nbytes = self.used_nbytes = 0
        #: The first error of a write; the file takes no more bytes then, unless the owner sets None.
        self.error: DataError | None = None
        self._waiting_nbytes, self._space = 0, Extents()
        # Guards all of the above, and the regions. Nobody holds it while bytes move.
        self._changed = threading.Condition()
        # Freed space that is still taken. Finalizers append to it, which wait for no lock.
        self._freed: deque[list[Extent]] = deque()
        # A fork has the file, and not the thread.
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "scratch")
        self._end = weakref.finalize(self, _end, self._thread, self._opened)
        kind = _in_memory(self.folder)
        if kind and not launched()[0]:
            warnings.warn(
                f"scratch: {self.folder} is a {kind}, which is memory: tensors there save none; name a"
                " directory on a disk",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return not self._end.alive

    def write(self, tensor: torch.Tensor) -> Region:
        """Begin to write a tensor, and return its place; the caller frees it.

        Blocks only while too much waits to be written. The tensor must not change before it is written, see
        ``wait``; a tensor that is not contiguous is copied first.

        Raises
        ------
        DataError
            If the quota is too small, or an earlier write has failed: the disk is full or broken.
        ClosedError
            If the file is closed.
        """
        source = flat_bytes(tensor)
        self._collect()
        with self._changed:
            most = _IN_FLIGHT_NBYTES - source.nbytes
            self._changed.wait_for(lambda: self._waiting_nbytes <= max(most, 0))
            self._check_open()
            if self.error:
                raise self.error
            taken = -(-source.nbytes // _PAGE) * _PAGE
            if self.quota is not None and self.used_nbytes + taken > self.quota:
                raise self._failure("the quota is used up", source.nbytes, "allow a larger quota")
            region = Region(source, self._space.take(taken))
            self.used_nbytes += taken
            self._waiting_nbytes += source.nbytes
            self._thread.submit(self._write, region)
        return region

    def wait(self, region: Region) -> None:
        """Block until a region is written, so that its tensor may change or go; raise if that has failed.

        Raises
        ------
        DataError
            If it cannot be written. Its tensor is still needed then: ``read`` copies from it.
        """
        with self._changed:
            self._changed.wait_for(lambda: region._source is None or region.error or self.closed)
            self._check_open()
            if region.error:
                raise region.error

    def flush(self) -> None:
        """Block until nothing waits to be written; ``error`` then says whether all of it is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_nbytes)

    def prefetch(self, region: Region, into: torch.Tensor) -> None:
        """Begin to read a region into a contiguous tensor of its size; ``read`` with the same tensor ends it.

        Does not block. The tensor is kept alive until then, and its values are undefined. A region has one
        prefetch at a time: a second one replaces the first, or waits if that is being read.
        """
        self._check_open()
        self.cancel(region)
        region.into, region._ahead = into, self._thread.submit(self._prefetch, region, into)

    def cancel(self, region: Region) -> bool:
        """Give up the prefetch of a region, if there is one, and its tensor; returns whether that is filled.

        One that has begun is waited for.
        """
        ahead, region.into, region._ahead = region._ahead, None, None
        # An error is raised by ``read``, which tries again.
        return ahead is not None and not ahead.cancel() and ahead.exception() is None

    def read(self, region: Region, into: torch.Tensor) -> None:
        """Fill a contiguous tensor of the region's size by its bytes; blocking, as often as wanted.

        A read does not queue behind the thread's jobs, as the one who reads has nothing else to do: it is
        done here, unless the thread is at it.

        Bytes that are not written yet come from memory, and those of a prefetch into this tensor are waited
        for.

        Raises
        ------
        DataError
            If the file cannot be read.
        """
        self._check_open()
        if not (region.into is into and self.cancel(region)):
            self._fetch(region, into)

    def free(self, region: Region) -> None:
        """Give the space of a region back; idempotent, never blocks. What is not written yet never is."""
        if not region._freed:
            region._freed, region._source, region.into = True, None, None
            self._freed.append(region._extents)

    def close(self) -> None:
        """Give all space back; idempotent. What is being written or read ends first."""
        with self._changed:
            self._end.detach()
            self._changed.notify_all()
        if os.getpid() == self._process:
            self._thread.shutdown()
        self._opened.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"scratch: the file in {self.folder} is closed")
        if os.getpid() != self._process:
            raise ClosedError(
                f"scratch: the file in {self.folder} belongs to the process that has forked this one"
            )

    # The rest runs on the thread, but for ``_fetch`` and ``_collect``.

    def _write(self, region: Region) -> None:
        source, error = region._source, self.error
        try:
            if not (source is None or error or self.closed):
                self._put(region, source)
        except Exception as raised:  # noqa: BLE001
            reason = str(getattr(raised, "strerror", None) or raised)
            error = self._failure(reason, region.nbytes, "free space there, or name another folder")
            error.__cause__ = raised
        with self._changed:
            self._waiting_nbytes -= region.nbytes
            self.error = region.error = error
            if not error:
                region._source = None
            self._changed.notify_all()
        self._shorten()

    def _put(self, region: Region, source: torch.Tensor) -> None:
        memory = source.numpy().data
        for at, length in region._extents:
            part, memory = memory[:length], memory[length:]
            write_at(self._file, part, at)
            self.written_nbytes += len(part)

    def _prefetch(self, region: Region, into: torch.Tensor) -> None:
        if not region._freed:
            self._fetch(region, into)
        self._shorten()

    def _fetch(self, region: Region, into: torch.Tensor) -> None:
        target, source = into.view(-1).view(torch.uint8), region._source
        if source is not None:
            target.copy_(source)
            return
        memory = target.numpy().data
        for at, length in region._extents:
            part, memory = memory[:length], memory[length:]
            try:
                count = read_at(self._file, part, at)
            except OSError as error:
                raise self._failure(error.strerror or str(error), 0, "check the disk") from error
            self.read_nbytes += count
            if count < len(part):
                raise self._failure("the file ends too early", 0, "check the disk")

    def _collect(self) -> None:
        with self._changed:
            while self._freed:
                for extent in self._freed.popleft():
                    self._space.give(extent)
                    self.used_nbytes -= extent[1]

    def _shorten(self) -> None:
        # Pages of the system's cache behind the new end are dropped and never written. Only this thread
        # writes, so that nothing lies there that is in use.
        self._collect()
        end = max(self._space.end, _KEPT_NBYTES)
        if end < os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)

    def _failure(self, reason: str, nbytes: int, advice: str) -> DataError:
        found = os.statvfs(self.folder) if self.folder.is_dir() else None
        free = "unknown" if found is None else f"{found.f_bavail * found.f_frsize} bytes"
        quota = "none" if self.quota is None else f"{self.quota} bytes"
        what = f"writing {nbytes} bytes" if nbytes else "reading"
        return DataError(
            f"scratch: {what} in {self.folder} failed: {reason}; free there: {free}, in use by this rank:"
            f" {self.used_nbytes} bytes, quota: {quota}; {advice}"
        )


def _end(thread: ThreadPoolExecutor, file: IO[bytes]) -> None:
    # Of a file that nobody uses: jobs would refer to it, so that there are none.
    thread.shutdown(wait=False)
    file.close()


def _in_memory(folder: Path) -> str:
    """Type of the file system of a folder if that lies in memory, else an empty text."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    # Unreadable, or no file number is left: it is for a warning only.
    with suppress(OSError):
        for fields in map(str.split, Path("/proc/self/mountinfo").read_text().splitlines()):
            if fields[2] == device and (kind := fields[fields.index("-") + 1]) in _IN_MEMORY:
                return kind
    return ""

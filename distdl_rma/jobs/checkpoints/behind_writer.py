"""A writer of large files whose disk works while the next bytes are copied.

Two buffers change places::

    rank's thread     fill A      fill B      fill A      wait, fsync
    disk's thread                 write A     write B     write A

The disk's time hides the copies and the checksums, or these hide the disk's time, whichever is shorter. It is
a thread and not the system's page cache that does so, since the cache takes the core's time for a second
copy, and memory of as many bytes as the checkpoint has, which the job may not have.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from distdl_rma.layers.sources.raw import write_at

# What a direct write is a multiple of: its address, its place in the file, its length. Disks want 512 or
# 4096; a file system that wants more refuses the write, which then goes through the cache.
_PAGE = 4096
# Of each buffer. A disk is at its full speed with a fraction of this.
_BUFFER = 8 << 20
# Fewer contiguous bytes are not worth a hand-over to the thread.
_SMALL = 1 << 16


class BehindWriter:
    """Writes runs of bytes into a file that exists, past the page cache where the file system allows it.

    Contiguous runs are joined in one of two buffers; a thread writes one while the other is filled. Whole
    pages are written directly from the buffer (``O_DIRECT``): this takes neither the core's time nor memory
    for pages that nobody reads. The rest, and everything on file systems without direct writes, goes through
    the page cache. ``OSError`` of a write is raised by a later call. Local.

    A context: at its end all bytes are on the disk, unless it ends by an error, whose bytes nobody needs.
    Only the first buffer is filled, and only the second one is written, by at most one job of the thread: who
    wants to exchange them waits for this job first, and then knows its error too.
    """

    def __init__(self, file: Path) -> None:
        self._cached = os.open(file, os.O_WRONLY)
        try:
            self._direct: int | None = os.open(file, os.O_WRONLY | os.O_DIRECT)
        except OSError:
            self._direct = None
        self._buffers = [memoryview(mmap.mmap(-1, _BUFFER)) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1, "checkpoint-disk")
        self._written: Future[None] | None = None
        # The first buffer's place in the file, a multiple of pages, and which of its bytes are filled: from
        # the one on that the first run has within its page. So pages of the buffer are pages of the file.
        self._place = self._first = self._last = 0

    def append(self, offset: int, memory: memoryview) -> None:
        """Write bytes at an offset of the file; they are copied."""
        while memory:
            if offset != self._place + self._last or self._last == _BUFFER:
                self._hand_over()
                self._first = self._last = offset % _PAGE
                self._place = offset - self._first
            count = min(len(memory), _BUFFER - self._last)
            self._buffers[0][self._last : self._last + count] = memory[:count]
            self._last += count
            memory, offset = memory[count:], offset + count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._hand_over()
                self._wait()
                os.fsync(self._cached)
        finally:
            self._thread.shutdown()
            for descriptor in (self._cached, self._direct):
                if descriptor is not None:
                    os.close(descriptor)

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _hand_over(self) -> None:
        # Writes what the first buffer has: large runs by the thread, and a small one at once, whose bytes the
        # page cache gathers.
        if self._first == self._last:
            return
        arguments = self._buffers[0], self._place, self._first, self._last
        if self._last - self._first < _SMALL:
            self._write(*arguments)
        else:
            self._wait()
            self._written = self._thread.submit(self._write, *arguments)
            self._buffers.reverse()
        self._first = self._last

    def _write(self, buffer: memoryview, place: int, first: int, last: int) -> None:
        # Bytes [first, last) of a buffer, of which whole pages go directly. Pages at both ends may be shared
        # with another rank, whose bytes a direct write of the whole page would destroy.
        low, high = -(-first // _PAGE) * _PAGE, last // _PAGE * _PAGE
        if high - low < _SMALL:
            low = high = last
        written = low + self._written_directly(buffer[low:high], place + low)
        for begin, end in ((first, low), (written, last)):
            write_at(self._cached, buffer[begin:end], place + begin)

    def _written_directly(self, pages: memoryview, offset: int) -> int:
        # How many bytes; the page cache takes the rest where the file system wants larger pages.
        count = 0
        while self._direct is not None and count < len(pages):
            try:
                done = os.pwrite(self._direct, pages[count:], offset + count)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            count += done // _PAGE * _PAGE
            if done % _PAGE:
                # The disk is about to be full: the write of the rest says so.
                break
        return count

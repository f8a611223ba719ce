"""Files by a path or a URL: bytes of a server by ranges, never a file as a whole.

A path is read by the system. Of a URL, ``fsspec`` asks the server for ranges of bytes. Runs of a box that lie
near each other are one request, since a request costs as much time as some thousand bytes more; far ones are
requests of their own, several at once::

    runs          ==  ==   ==                     ==      ========
    requests      [---------]                     [-]     [--][--]
                  gaps below 64 KiB are fetched           no answer is above 4 MiB

Nothing here outlives a call but a URL and a position, so that a fork or another process that has it only asks
again: connections belong to ``fsspec``, which opens new ones in each process. A server that answers a range
by the whole file is refused when its first header arrives, and one that sends nothing for 30 seconds is an
error. Files change while a job runs: the version that the server names is compared after each box.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from io import BufferedReader, RawIOBase
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from distdl_rma.errors import ArgumentError, DataError, told

# Seconds without a byte after which a server of http counts as gone, and seconds of a whole answer.
_SILENT_SECONDS, _ANSWER_SECONDS = 30.0, 300.0
# Bytes of an answer at most, answers at a time, bytes between two runs that are fetched with both, and bytes
# that a library gets at a time which reads a header by small pieces.
_ANSWER_NBYTES, _AT_A_TIME, _GAP_NBYTES, AHEAD_NBYTES = 4 << 20, 8, 64 << 10, 64 << 10
# What servers and stores say of the version of a file.
_VERSION = ("size", "ETag", "Last-Modified", "LastModified", "md5Hash", "generation", "mtime", "modified")
_Run = tuple[memoryview, int]


def needed(package: str, extra: str = "") -> Any:
    """An optional package; ``DataError`` with the command that installs it if it is missing."""
    command = f"pip install 'distdl_rma[{extra}]'" if extra else f"pip install {package}"
    with told(DataError, f"this file is read by {package}, which is not installed", command, ImportError):
        return import_module(package)


def is_url(path: str) -> bool:
    """Whether a file is of a server, and not of the system."""
    return "://" in path


def check_found(path: str) -> None:
    """``DataError`` if this process does not see a file or folder; a server is asked later."""
    if is_url(path):
        return
    if not Path(path).exists():
        raise DataError(
            f"{path}: not found on {platform.node()} from {Path.cwd()}; ranks on several machines need a path"
            " that leads all of them to the file"
        )
    if not (Path(path).is_file() or Path(path).is_dir()):
        raise DataError(f"{path}: is a pipe or a device, of which no box can be read; copy it into a file")


def opened(path: str) -> BinaryIO:
    """The bytes of a file, for a library that reads its header."""
    return BufferedReader(UrlFile(path), AHEAD_NBYTES) if is_url(path) else Path(path).open("rb")


def nbytes_of(path: str) -> int:
    """How many bytes a file has."""
    return UrlFile(path).nbytes if is_url(path) else Path(path).stat().st_size


def version_of(url: str) -> tuple[Any, ...]:
    """What a server says now about a file: its size, and what else changes with its bytes."""
    files, place = filesystem(url)
    with told(DataError, url):
        # Stores keep what they have listed.
        files.invalidate_cache()
        info = files.info(place)
    return tuple(info.get(name) for name in _VERSION)


def fetch(url: str, runs: Iterable[_Run]) -> None:
    """Fill memories by the bytes from their places on, which ascend; ``DataError`` if fewer come."""
    (files, place), blocks = filesystem(url), _blocks(runs)
    while some := [*islice(blocks, _AT_A_TIME)]:
        starts = [block[0][1] for block in some]
        ends = [at + len(memory) for *_, (memory, at) in some]
        with told(DataError, url):
            answers = files.cat_ranges([place] * len(some), starts, ends, on_error="raise")
        for block, start, end, answer in zip(some, starts, ends, answers, strict=True):
            if len(answer) != end - start:
                raise DataError(
                    f"{url}: {len(answer)} bytes came for {end - start} from byte {start} on; has the file"
                    " become shorter since it was opened?"
                )
            for memory, at in block:
                memory[:] = answer[at - start : at - start + len(memory)]


def _blocks(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    # Runs, or parts of long ones, of which one answer has all bytes.
    block, end = list[_Run](), 0
    for run, first in runs:
        for done in range(0, len(run), _ANSWER_NBYTES):
            memory, at = run[done : done + _ANSWER_NBYTES], first + done
            if block and (at - end > _GAP_NBYTES or at + len(memory) - block[0][1] > _ANSWER_NBYTES):
                yield block
                block = []
            block.append((memory, at))
            end = at + len(memory)
    if block:
        yield block


def meet_receiver() -> None:
    """Wait until the thread that receives bytes does nothing else."""
    asyn = needed("fsspec.asyn", "remote")
    asyn.sync(asyn.get_loop(), asyncio.sleep, 0)


class UrlFile(RawIOBase):
    """A file of a server, which is read at its position; has no handle."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        self.nbytes: int = version_of(url)[0]
        if self.nbytes is None:
            raise DataError(f"{url}: the server does not say its size; download it, or ask another server")

    def readinto(self, memory: Any) -> int:
        """Fill the memory, but for what would be behind the end."""
        count = max(0, min(len(memory), self.nbytes - self.at))
        fetch(self.url, [(memoryview(memory)[:count], self.at)] if count else [])
        self.at += count
        return count

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a position."""
        self.at = at + (0, self.at, self.nbytes)[whence]
        return self.at

    def readable(self) -> bool:
        """It is."""
        return True

    seekable = readable


def filesystem(url: str) -> tuple[Any, str]:
    """The ``fsspec`` file system of this process and thread for a URL, and the path in it."""
    fsspec, protocol = needed("fsspec", "remote"), url.partition("://")[0]
    options = {}
    if protocol in ("http", "https"):
        timeout = needed("aiohttp", "remote").ClientTimeout(
            _ANSWER_SECONDS, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS
        )
        chosen = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
        options["client_kwargs"] = {"timeout": timeout, **chosen, "middlewares": (_range_alone,)}
    # Its own words name the package that it lacks.
    with told(ArgumentError, f"{url}: fsspec", of=ValueError), told(DataError, url, of=ImportError):
        files = fsspec.filesystem(protocol, **options)
    return files, files._strip_protocol(url)


async def _range_alone(request: Any, answer: Callable[[Any], Any]) -> Any:
    # Around each request of http. Compressed bytes have other ranges.
    request.headers["Accept-Encoding"] = "identity"
    found = await answer(request)
    if "Range" in request.headers and found.status == 200:
        found.close()
        raise OSError(
            "the server answers a request for a range by the whole file, so that every rank would read all of"
            " it; download the file, or have a server that takes range requests"
        )
    return found

"""Messages between the slabs of a sample, kept on disk: a later process resumes the sample from them.

Messages that wait for their readers are in a ``Mailbox``, in memory or in the scratch file of ``Pages``, and
vanish with the process. The log keeps copies of the same messages beside the result, until it is complete.

Five slabs; the process was killed while it computed slab 2::

    slab        0          1       |   2          3          4
                written    written |   begun      -          -
                                   |
    messages    0 -> 1             |                             removed: slab 1 is written
                           1 -----> 2                            kept: they cross the line before slab 2
                0 -----------------------------> 3
                           1 ------------------> 3

    files       0-1-2.messages    0-0-3.messages    0-1-3.messages        (sample-sender-receiver)

The next process computes slabs 2, 3 and 4. Slab 2 sends its messages again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from distdl_rma.segments.channel import Array
from distdl_rma.segments.mailbox import Address, Message

# Writing takes a tenth of the time at most, where it takes longer than so many seconds.
_SHARE, _QUICK_SECONDS = 0.1, 0.2
_SUFFIX = ".messages"


class ResumeLog:
    """Files of messages for later slabs, one for each sender and receiver, in a folder.

    A sample can be resumed at a slab if slabs need earlier ones only, and if all messages of earlier slabs
    for it and for later ones are here. Nothing else of a slab that has ended is needed, so any process may
    resume it.

    Always true: the file of a pair has the messages of this pair in the order in which they were sent, each
    with two checksums, of its head and of its pieces. A process that is killed may leave a part of a message
    at the end of a file; ``read`` refuses that file, and the sample begins anew.

    On a slow disk the messages would take longer than the slabs. There whole receivers are left out, from
    their first message on; the sample cannot be resumed between such a sender and its receiver, but at other
    slabs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun, self._spent = time.monotonic(), 0.0
        self._forget_all()

    def _forget_all(self) -> None:
        self._pairs: set[tuple[int, int]] = set()
        # For each receiver whether its messages are written, and the first sender whose messages were not.
        self._written: dict[int, bool] = {}
        self._left_out: dict[int, int] = {}

    def keep(self, sample: int, address: Address, message: Message) -> None:
        """Write a message behind the earlier ones of its sender and receiver, if that is a later slab."""
        _, sender, receiver = address
        if sender > receiver:
            return
        begin = time.monotonic()
        if receiver not in self._written:
            most = max(_QUICK_SECONDS, _SHARE * (begin - self._begun))
            self._written[receiver] = self._spent <= most
        if not self._written[receiver]:
            self._left_out[receiver] = min(sender, self._left_out.get(receiver, sender))
            return
        self._pairs.add((sender, receiver))
        with self._path(sample, sender, receiver).open("ab") as file:
            pieces = [np.asarray(piece, order="C") for piece in message.pieces]
            head = [address.channel, *message.kind, [(piece.dtype.str, piece.shape) for piece in pieces]]
            file.write(json.dumps([_checksum_of(head), _checksum(pieces), *head]).encode() + b"\n")
            for piece in pieces:
                file.write(piece.data)
        self._spent += time.monotonic() - begin

    def has_all_for(self, slab: int) -> bool:
        """Whether a process could resume at a slab, once the slabs before it have ended."""
        return not any(sender < slab <= receiver for receiver, sender in self._left_out.items())

    def forget(self, sample: int, slab: int) -> None:
        """Remove the messages for slabs before this one, at which a process would resume."""
        for sender, receiver in [each for each in self._pairs if each[1] < slab]:
            self._path(sample, sender, receiver).unlink()
            self._pairs.remove((sender, receiver))

    def clear(self) -> None:
        """Remove all messages: the sample has ended."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            path.unlink()
        self._forget_all()

    def read(self, sample: int, slab: int) -> list[tuple[Address, Message]]:
        """Messages of the slabs before this one for it and those behind it, in the order of each address.

        The other files are removed: slabs that are computed again write them again. ``ValueError`` or
        ``TypeError`` if a file is damaged.
        """
        found, pairs = [], set[tuple[int, int]]()
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            of_sample, sender, receiver = map(int, path.stem.split("-"))
            if of_sample != sample or not sender < slab <= receiver:
                path.unlink()
                continue
            pairs.add((sender, receiver))
            with path.open("rb") as file:
                while line := file.readline():
                    of_head, of_pieces, *head = json.loads(line)
                    # Before the pieces are read: a damaged head may ask for any amount of memory.
                    if _checksum_of(head) != of_head:
                        raise ValueError(f"{path} is damaged")
                    channel, fingerprint, dtype, forms = head
                    pieces = [np.fromfile(file, kind, prod(shape)).reshape(shape) for kind, shape in forms]
                    if _checksum(pieces) != of_pieces:
                        raise ValueError(f"{path} is damaged")
                    found.append((Address(channel, sender, receiver), Message(pieces, (fingerprint, dtype))))
        self._pairs |= pairs
        self._written |= dict.fromkeys((receiver for _, receiver in pairs), True)
        return found

    def _path(self, sample: int, sender: int, receiver: int) -> Path:
        return self._folder / f"{sample}-{sender}-{receiver}{_SUFFIX}"


def _checksum_of(head: list[Any]) -> int:
    return crc32(json.dumps(head).encode())


def _checksum(pieces: Iterable[Array]) -> int:
    found = 0
    for piece in pieces:
        found = crc32(piece.data, found)
    return found

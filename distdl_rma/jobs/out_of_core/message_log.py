"""Messages between the slabs of a sample on disk: a later process takes those that its first slab needs."""

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


class MessageLog:
    """Files of messages for later slabs, one for each sender and receiver, in a folder.

    Where slabs need earlier ones only, a sample can go on at any slab for which, and behind which, all
    messages of the slabs before it are here, whoever computes which slab. Files of a slow disk would take
    longer than computing again: there the messages for some receivers are left out.
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
            file.write(json.dumps([_of_head(head), _of_pieces(pieces), *head]).encode() + b"\n")
            for piece in pieces:
                file.write(piece.data)
        self._spent += time.monotonic() - begin

    def has_all_for(self, slab: int) -> bool:
        """Whether a process could go on at a slab, once the slabs before it have ended."""
        return not any(sender < slab <= receiver for receiver, sender in self._left_out.items())

    def forget(self, sample: int, slab: int) -> None:
        """Remove the messages for slabs before this one, at which a process would go on."""
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
                    if _of_head(head) != of_head:
                        raise ValueError(f"{path} is damaged")
                    channel, fingerprint, dtype, forms = head
                    pieces = [np.fromfile(file, kind, prod(shape)).reshape(shape) for kind, shape in forms]
                    if _of_pieces(pieces) != of_pieces:
                        raise ValueError(f"{path} is damaged")
                    found.append((Address(channel, sender, receiver), Message(pieces, (fingerprint, dtype))))
        self._pairs |= pairs
        self._written |= dict.fromkeys((receiver for _, receiver in pairs), True)
        return found

    def _path(self, sample: int, sender: int, receiver: int) -> Path:
        return self._folder / f"{sample}-{sender}-{receiver}{_SUFFIX}"


def _of_head(head: list[Any]) -> int:
    # Checksum of what says how the pieces are read.
    return crc32(json.dumps(head).encode())


def _of_pieces(pieces: Iterable[Array]) -> int:
    found = 0
    for piece in pieces:
        found = crc32(piece.data, found)
    return found

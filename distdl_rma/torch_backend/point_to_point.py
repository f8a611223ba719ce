"""Messages from one rank of a group to another, matched by tag.

A message is three messages of MPI, so that neither rank reads bytes of another size or type::

    sender                                    receiver
    its facts, "16 bytes of torch.float32" -> compares them with its own
    compares them with its own            <-  its facts
    the data, if the facts are equal      ->  the data

Both begin without waiting: a sender does not need the receiver before the data, and two ranks may send to
each other first. The sender's facts come first, since they also tell a receiver of any rank who sends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from weakref import WeakValueDictionary

import numpy as np

from distdl_rma.errors import ArgumentError, MismatchError
from distdl_rma.segments.collectives.between_nodes import Messages, Script
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.torch_backend.operations import Finish, OperationQueue, PendingCall

# Messages of one tag: the sender's facts, the receiver's facts, and the data.
_KINDS = 3


class PointToPoint:
    """Sends and receives of a group.

    Sender and receiver both raise ``MismatchError`` if size or type differ. Messages of one tag between the
    same two ranks keep their order: each begins when the one before it is over. Otherwise the facts of the
    second could meet the data of the first.
    """

    def __init__(self, messages: Messages, queue: OperationQueue, me: int, name: str) -> None:
        self._messages, self._queue, self._me, self._name = messages, queue, me, name
        self._most = messages.largest_tag() // _KINDS - 1
        # Forgotten when they are over: the queue keeps those under way.
        self._last: WeakValueDictionary[tuple[str, int, int], PendingCall] = WeakValueDictionary()

    def receive_any(
        self, out: Array, kind: str, tag: int, found: Callable[[int], None], finish: Finish
    ) -> PendingCall:
        """Begin to receive bytes from the rank that sends first; passes it to ``found``."""
        self._check_tag(tag)

        def script() -> Script:
            while (source := self._messages.probe(tag * _KINDS)) is None:
                yield
            found(source)
            yield from self._receive(out, kind, source, tag)

        others = tuple(rank for at, rank in enumerate(self._messages.ranks) if at != self._me)
        reason = WaitReason(others, f"to send with tag {tag} in group {self._name!r}", anyone=True)
        return self._queue.add(PendingCall(script, lambda: reason, finish))

    def begin(
        self, verb: str, data: Array, kind: str, peer: int, tag: int, finish: Finish = ()
    ) -> PendingCall:
        """Begin to ``"send"`` bytes of elements of a ``kind``, or to ``"recv"`` them, then ``finish``."""
        self._check_tag(tag)
        ranks = self._messages.ranks
        if not 0 <= peer < len(ranks):
            group = f"{verb} in group {self._name!r}"
            raise ArgumentError(
                f"{group}: the peer is a rank in the group, from 0 to {len(ranks) - 1}, got {peer}"
            )
        key = verb, peer, tag
        before = self._last.get(key)
        sends = verb == "send"

        def script() -> Script:
            while before is not None and not before.done:
                yield
            yield from (self._send if sends else self._receive)(data, kind, peer, tag)

        what = f"to {'receive' if sends else 'send'} {data.size} bytes with tag {tag} in group {self._name!r}"
        reason = WaitReason((ranks[peer],), what, "did it make the matching call?")
        operation = PendingCall(script, lambda: reason, finish)
        self._last[key] = operation
        return self._queue.add(operation)

    def _send(self, data: Array, kind: str, target: int, tag: int) -> Script:
        mine, theirs = _facts(data, kind), _facts(data[:0], "")
        sending = self._messages.send(mine, target, tag * _KINDS)
        receiving = self._messages.receive(theirs, target, tag * _KINDS + 1)
        yield from chain(sending, receiving)
        self._check(mine, theirs, target, tag)
        yield from self._messages.send(data, target, tag * _KINDS + 2)

    def _receive(self, out: Array, kind: str, source: int, tag: int) -> Script:
        mine, theirs = _facts(out, kind), _facts(out[:0], "")
        yield from self._messages.receive(theirs, source, tag * _KINDS)
        sending = self._messages.send(mine, source, tag * _KINDS + 1)
        alike = _text(mine) == _text(theirs)
        yield from chain(sending, self._messages.receive(out, source, tag * _KINDS + 2) if alike else ())
        self._check(theirs, mine, source, tag)

    def _check(self, sent: Array, wanted: Array, peer: int, tag: int) -> None:
        if _text(sent) != _text(wanted):
            raise MismatchError(
                f"group {self._name!r}: send and recv with tag {tag} between ranks"
                f" {self._messages.ranks[self._me]} and {self._messages.ranks[peer]}: {_text(sent)} are sent,"
                f" but {_text(wanted)} are expected"
            )

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._most:
            raise ArgumentError(f"a tag is from 0 to {self._most}, got {tag}")


def _facts(data: Array, kind: str) -> Array:
    text = f"{data.size} bytes of {kind}".encode()[:64]
    return np.frombuffer(text.ljust(64, b"\0"), np.uint8).copy()


def _text(facts: Array) -> str:
    return facts.tobytes().rstrip(b"\0").decode(errors="replace")

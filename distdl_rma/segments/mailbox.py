"""Messages of virtual ranks that run in their order: they wait in the process's memory, without slots.

A rank that runs to its end before the next one begins can have no reader that acknowledges. What it sends is
copied once, and lies in the ``Mailbox`` until it is received::

    rank 0   conv1: send  conv2: send  end
                 |            |                        messages, by (channel, sender, receiver):
                 +------------+--------------------->  (conv1, 0, 1): [m]   (conv2, 0, 1): [m]
                                                           |                    |
    rank 1                                             conv1: receive  ...  conv2: receive

``BufferedChannel``, ``BufferedVectors`` and ``BufferedAllreduce`` have the methods of ``Channel``,
``AllPush`` and ``Allreduce``, so that operations are the same for ranks that run together.

Three names to tell apart: a ``Mailbox`` has what was sent and not received; a ``ParcelKeeper`` may store that
elsewhere meanwhile, such as on a disk; the action ``keep`` gets a copy of each message, for a later process.
``SharedMailbox`` carries messages to other processes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import le
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.errors import MismatchError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.segments.channel import Array, Channel
from distdl_rma.segments.collectives.reduction import Element, Reduction, element_of
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason


class Address(NamedTuple):
    """Name of a channel, sender and receiver: the key of a queue of messages.

    Channels may share a name, such as those of a layer that is called with two shapes. All ranks call them in
    the same order, so the messages of an address are received in the order in which they were sent.
    """

    channel: str
    sender: int
    receiver: int


class Parcel:
    """An array that waits for one or more receivers; meanwhile a keeper may store it elsewhere.

    Always true: ``readers`` counts messages in the mailbox that have this parcel. A keeper hears of it when
    the first comes and when the last has gone, and nobody changes the array.
    """

    __slots__ = ("_fetch", "nbytes", "readers")

    def __init__(self, array: Array) -> None:
        self._fetch: Callable[[], Array] = lambda: array
        self.nbytes, self.readers = array.nbytes, 0

    @property
    def array(self) -> Array:
        """The array; in new memory at every call if a keeper stores it."""
        return self._fetch()

    def leave(self, fetch: Callable[[], Array]) -> None:
        """Drop the array, which ``fetch`` returns from now on."""
        self._fetch = fetch


class Message:
    """The pieces of a message, and the fingerprint and dtype of the sender's exchange.

    Messages share the parcels of pieces that several receivers get.
    """

    def __init__(self, pieces: Iterable[Array | Parcel], kind: tuple[int, str]) -> None:
        self.parcels = [each if isinstance(each, Parcel) else Parcel(each) for each in pieces]
        self.kind = kind

    @property
    def pieces(self) -> list[Array]:
        """Arrays of the pieces."""
        return [parcel.array for parcel in self.parcels]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(parcel.nbytes for parcel in self.parcels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets a copy of the pieces."""
        return Message, (self.pieces, self.kind)


class ParcelKeeper(Protocol):
    """Stores parcels that wait for their receivers, in memory or elsewhere."""

    def store(self, parcel: Parcel, receiver: int) -> None:
        """Take over a parcel that waits for a receiver, and perhaps for others."""

    def drop(self, parcel: Parcel) -> None:
        """Forget a parcel that all receivers have."""


# Key of the vectors of one exchange: its name, the ranks that take part, and its epoch.
VectorKey = tuple[str, tuple[int, ...], int]


class Mailbox:
    """Messages between the virtual ranks of a process that were sent and not yet received.

    Without acknowledgements, a rank may run ahead of its readers by any number of epochs and channels. If
    data moves to later ranks only, later ranks need nothing of earlier ones but their messages.

    Always true: messages of one address are in the order in which they were sent, and a queue without
    messages is not there. One thread at a time uses the mailbox, since virtual ranks take turns: there is no
    lock.

    ``nbytes`` are the bytes of all messages, also of those that a ``keeper`` stores; ``peak_nbytes`` is their
    maximum. ``whole_nbytes`` is the maximum of one call in which a rank sends most of its block. ``cuts`` are
    the dimensions that such calls cut: the number of dimensions, the dimension, and its extent before. Ranks
    before ``first`` have ended in an earlier process, and send nothing more. ``tell`` calls ``actions`` by
    their names; the action ``keep``, if there is one, gets the address of each message, and the message.
    """

    def __init__(self, first: int = 0, actions: dict[str, Callable[..., Any]] | None = None) -> None:
        self.first, self.actions = first, actions or {}
        self.messages: dict[Address, deque[Message]] = {}
        self.vectors: defaultdict[VectorKey, dict[int, Array]] = defaultdict(dict)
        # The highest rank for which another one has waited.
        self.wanted = 0
        self.keeper: ParcelKeeper | None = None
        self.nbytes = self.peak_nbytes = self.whole_nbytes = 0
        self.cuts: set[tuple[int, int, int]] = set()

    def put(self, address: Address, message: Message) -> None:
        """Store a message that was sent; its arrays belong to it and do not change."""
        self.keep(address, message)
        self.store(address, message)

    def keep(self, address: Address, message: Message) -> None:
        """Pass a message that was sent to the action ``keep``, if there is one."""
        if "keep" in self.actions:
            self.tell("keep", address, message)

    def store(self, address: Address, message: Message) -> None:
        """Store a message for its receiver, a rank of this process."""
        self.messages.setdefault(address, deque()).append(message)
        for parcel in message.parcels:
            parcel.readers += 1
            if parcel.readers == 1:
                self.nbytes += parcel.nbytes
                if self.keeper is not None:
                    self.keeper.store(parcel, address.receiver)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def add(self, key: VectorKey, rank: int, vector: Array) -> None:
        """Store the vector of a rank, which does not change."""
        self.vectors[key][rank] = vector

    def want(self, rank: int) -> None:
        """Record that another rank waits for ``rank``."""
        self.wanted = max(self.wanted, rank)

    def poll(self) -> None:
        """Receive what other processes have sent; here there are none."""

    def tell(self, action: str, *arguments: Any) -> None:
        """Call an action by its name."""
        self.actions[action](*arguments)

    def has(self, address: Address) -> bool:
        """Whether a message has arrived at an address."""
        if address not in self.messages:
            self.poll()
        return address in self.messages

    def remove(self, address: Address) -> None:
        """Remove the first message of an address, which was received."""
        messages = self.messages[address]
        for parcel in messages.popleft().parcels:
            parcel.readers -= 1
            if not parcel.readers:
                self.nbytes -= parcel.nbytes
                if self.keeper is not None:
                    self.keeper.drop(parcel)
        if not messages:
            del self.messages[address]


class _Awaits:
    """A handle that waits for messages of other ranks."""

    name: str
    _manager: SegmentManager
    _mailbox: Mailbox

    def _await_all(
        self, ranks: Iterable[int], has: Callable[[int], bool], epoch: int, timeout: float | None = None
    ) -> None:
        """Wait until what each of some ranks sends in an epoch is there; blocking.

        One wait for all of them: with a wait for each, the memory of this rank would go to the disk and back
        each time. ``MismatchError`` if a rank has ended in an earlier process, and so sends nothing more.
        """
        missing = [rank for rank in ranks if not has(rank)]
        if not missing:
            return
        if (ended := min(missing)) < self._mailbox.first:
            raise MismatchError(
                f"{self.name!r}: rank {ended} has ended in an earlier process, which sent no message for this"
                " call: has the program changed since? Remove what that process has left, to begin anew"
            )
        self._mailbox.want(max(missing))

        def all_there() -> bool:
            while missing and has(missing[-1]):
                missing.pop()
            return not missing

        def reason() -> WaitReason:
            # A peer whose message has come may have left.
            silent = tuple(rank for rank in missing if not has(rank))
            what = f"to send in {self.name!r} (epoch {epoch})"
            return WaitReason(silent, what, "did every rank call the same layers?", in_step=True)

        self._manager.waiter.until(all_there, reason, timeout)


class BufferedChannel(_Awaits, Channel):
    """Executes an ``exchange`` of virtual ranks of one process; ``start`` waits for nobody.

    A :class:`Channel` without segment memory and without addresses to exchange: a start copies each piece
    into new memory, in the ``mailbox`` that all ranks share, where it stays until it is received. A piece for
    several peers is copied once. A receive waits for all peers at once, and raises ``MismatchError`` if
    sender and receiver have different exchanges.
    """

    def __init__(
        self, manager: SegmentManager, exchange: Exchange, dtype: DTypeLike, name: str, mailbox: Mailbox
    ) -> None:
        self.exchange, self.dtype, self.name = exchange, np.dtype(dtype), name
        self._manager, self._mailbox = manager, mailbox
        self.sends, self.receives = exchange.sends, exchange.receives
        self._messages_out = by_peer(exchange.sends)
        boxes = {piece.box for piece in exchange.sends}
        both = zip(exchange.own.bounds, exchange.need.bounds, strict=True)
        moved = [all(map(le, need, own)) for own, need in both if own != need]
        # If the parts of the same cut end earlier, a rank sends the rest of its block to later ranks.
        behind = moved == [True] and not exchange.images
        self._sends_most = not behind and 2 * sum(box.volume for box in boxes) >= exchange.own.volume
        self._messages_in = list(by_peer(exchange.receives))
        self.landed = [False] * len(self.receives)
        self._own_shape = exchange.own.shape
        self._cuts = [piece.box.slices(exchange.own) for piece in self.sends]
        self._kind = exchange.fingerprint, str(self.dtype)
        self._operation = manager.operation(name)
        self._started = self._finished = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the segment that the channel holds: none."""
        return 0

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to exchange with anyone."""
        return not self._messages_in and not self._messages_out

    def count(self, pieces: int) -> int:
        """Number of parts in which the first ``pieces`` received pieces arrive: one for each."""
        return pieces

    def connect(self, timeout: float | None = None) -> None:
        """Do nothing: there are no addresses."""
        self._check()

    def start(self, parts: Iterable[Array]) -> int:
        """Copy one array per send into messages for the peers; return the epoch. Does not block."""
        self._check()
        self._started = epoch = self._started + 1
        self._manager.begin(self._operation, epoch)
        source, parcels, box = iter(parts), dict[Box, Parcel](), self._mailbox
        for peer, pieces in self._messages_out:
            for piece in pieces:
                part = next(source)
                if piece.box not in parcels:
                    parcels[piece.box] = Parcel(np.array(part, self.dtype, order="C"))
            message = Message((parcels[piece.box] for piece in pieces), self._kind)
            box.put(Address(self.name, self._manager.rank, peer), message)
        if self._sends_most:
            own, need = self.exchange.own.shape, self.exchange.need.shape
            box.cuts |= {(len(own), d, n) for d, (n, m) in enumerate(zip(own, need, strict=True)) if m < n}
            box.whole_nbytes = max(box.whole_nbytes, sum(parcel.nbytes for parcel in parcels.values()))
        return epoch

    def ready(self, epoch: int) -> bool:
        """Whether all pieces of an epoch have arrived; does not block."""
        return all(self._has(peer) for peer, _ in self._messages_in)

    def take_result(self, epoch: int) -> Array | None:
        """Return None, since peers put no results; waits first, so that no result takes memory meanwhile."""
        self._await(epoch)
        return None

    def receive(self, epoch: int, timeout: float | None = None) -> Iterator[tuple[Piece, Array]]:
        """Wait for all pieces of an epoch, and yield them in plan order; epochs in order.

        Each array is valid until the next one is requested.
        """
        self._check_next(epoch)
        self._await(epoch, timeout)
        for peer, expected in self._messages_in:
            message = self._mailbox.messages[address := self._from(peer)][0]
            if message.kind != self._kind:
                raise MismatchError(
                    f"{self.name!r}: rank {peer} sends {[p.shape for p in message.pieces]} of"
                    f" {message.kind[1]}, rank {self._manager.rank} expects"
                    f" {[p.box.shape for p in expected]} of {self._kind[1]}: did every rank call the same"
                    " layers?"
                )
            for piece, parcel in zip(expected, message.parcels, strict=True):
                yield piece, parcel.array
            self._mailbox.remove(address)
        self._finished = epoch

    def _await(self, epoch: int, timeout: float | None = None) -> None:
        peers = (peer for peer, _ in self._messages_in)
        self._await_all(peers, self._has, epoch, timeout)

    def _has(self, peer: int) -> bool:
        return self._mailbox.has(self._from(peer))

    def void(self) -> None:
        """Drop the next epoch to receive; its messages have arrived, or are never sent."""
        self._check()
        self._finished = epoch = self._finished + 1
        self._started = max(self._started, epoch)
        for peer, _ in self._messages_in:
            if (address := self._from(peer)) in self._mailbox.messages:
                self._mailbox.remove(address)

    def close(self) -> None:
        """End the use of the channel; local, idempotent."""
        self._closed = True

    def _from(self, peer: int) -> Address:
        return Address(self.name, peer, self._manager.rank)


class BufferedVectors(_Awaits):
    """All-gather of small vectors, for virtual ranks of one process; one wait for all of them.

    ``ranks`` include this one, and are equal on all of them. There are no addresses to exchange.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str, mailbox: Mailbox) -> None:
        self._manager, self._ranks, self.name, self._mailbox = manager, tuple(ranks), name, mailbox
        self.epoch = 0
        #: Rows in the segment, as those of an ``AllPush``: none.
        self.rows: tuple[list[Array], ...] = ()

    def connect(self) -> None:
        """Do nothing: there are no addresses."""

    def start(self, vector: Array) -> None:
        """Show a copy of this rank's vector to the others. Vectors have equal lengths and dtypes."""
        self.epoch += 1
        key = self.name, self._ranks, self.epoch
        # Kept here: the first rank that has all takes them out of the mailbox.
        self._begun = key, self._mailbox.vectors[key]
        self._mailbox.add(key, self._manager.rank, vector.copy())

    def wait(self) -> Array:
        """The vectors of all ranks, a row for each in the order of ``ranks``; blocking."""
        (key, vectors), poll = self._begun, self._mailbox.poll

        def has(rank: int) -> bool:
            if rank not in vectors:
                poll()
            return rank in vectors

        self._await_all(self._ranks, has, self.epoch)
        self._mailbox.vectors.pop(key, None)
        return np.stack([vectors[rank] for rank in self._ranks])

    def close(self) -> None:
        """Do nothing: no segment memory is held."""


class BufferedAllreduce(BufferedVectors):
    """Reduction over virtual ranks of one process, each element in the order of ``ranks``; one wait."""

    def __init__(self, *where: Any, op: str, dtype: DTypeLike | Element) -> None:
        super().__init__(*where)
        self._reduction = Reduction(op, element_of(dtype, self.name), len(self._ranks), self.name)

    def __call__(self, values: Array) -> Array:
        """The result, in new memory; blocking."""
        self.start(values)
        rows = list[Array](self.wait())
        self._reduction.reduce(rows, rows[0])
        return rows[0]

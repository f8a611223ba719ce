"""An exchange made executable: two slots, an epoch counter, acknowledgements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ClosedError, ProtocolError, ShapeError
from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.geometry.split import Balanced
from distdl_rma.segments.buffer import SegmentBuffer
from distdl_rma.segments.heap import aligned
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.patience import Waiting
from distdl_rma.segments.remote import RemoteBuffer

__all__ = ["Channel"]

Array = npt.NDArray[Any]
_SLOTS = 2
# A large message is announced bit by bit: its reader begins while its writer goes on.
_STEP_NBYTES = 1 << 20


@dataclass
class _Lane:
    # One peer's share of a channel in one direction; a message is all pieces for that peer.
    peer: int
    pieces: tuple[Piece, ...]
    nbytes: int
    offset: int  # of the first slot, or of the staging area, in this rank's buffer
    notification: int  # of this rank's buffer: the data flag (receives) or the ack flag (sends)
    ends: tuple[int, ...]  # behind which pieces the data flag rises, the last one included
    views: tuple[tuple[Array, ...], ...] = ()
    staged: tuple[Array, ...] = ()
    remote: RemoteBuffer | None = None

    @property
    def stride(self) -> int:
        return aligned(self.nbytes)

    def risen(self, epoch: int, steps: int | None = None) -> int:
        """Value of the data flag after some steps of an epoch, or all of them."""
        every = len(self.ends)
        return (epoch - 1) * every + (every if steps is None else steps)


class Channel:
    """Executes one exchange again and again: ``start``, go on, ``receive``.

    Per ordered pair of peers: two slots and a data flag at the receiver, an acknowledge flag at the
    sender. A start puts each piece into the peer's slot and notifies; it does not wait, unless this rank
    is two epochs ahead of a reader. Memory: two slots per received piece, allocated at construction,
    freed after ``close()`` when no peer can write to it any more. Only ranks that exchange something
    talk; construction is local, the first start connects the neighbours.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    exchange
        This rank's part of the movement.
    dtype
        Type of the elements that move.
    name
        Name of the layer, for messages.

    Attributes
    ----------
    sends, receives
        Pieces of the exchange as they move: large ones in several, the reader follows its writer.

    Notes
    -----
    The exchange buffers of the interface document, sections 3.2, 3.2.1 and 3.2.2.
    """

    def __init__(self, manager: SegmentManager, exchange: Exchange, dtype: npt.DTypeLike, name: str) -> None:
        self.exchange = exchange
        self.dtype = np.dtype(dtype)
        self.name = name
        self._manager = manager
        own = exchange.own
        self._own_shape = own.shape
        item = self.dtype.itemsize
        self.sends, self.receives = (_steps(p, item) for p in (exchange.sends, exchange.receives))
        self._sent = [piece.box.slices(own) for piece in self.sends]
        receives, sends = by_peer(self.receives), by_peer(self.sends)
        flags = count()
        end = 0
        self._receives: list[_Lane] = []
        self._sends: list[_Lane] = []
        for lanes, groups in ((self._receives, receives), (self._sends, sends)):
            for peer, pieces in groups:
                nbytes = item * sum(piece.box.volume for piece in pieces)
                lane = _Lane(peer, pieces, nbytes, end, next(flags), _ends(pieces, item))
                lanes.append(lane)
                if lanes is self._receives or manager.segment.link(peer).memory is None:
                    end += _SLOTS * lane.stride
        self._buffer: SegmentBuffer = manager.get_segment_buffer(end, len(receives) + len(sends), name)
        self._connected = not receives and not sends
        self._operation = manager.operation(name)
        # Of a recording: epochs under way, and what to call when everything of one has arrived.
        self._flights: dict[int, Callable[[], bool]] = {}
        self._started = 0
        self._finished = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of segment that the channel holds, without its flags."""
        return self._buffer.nbytes

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to exchange with anyone."""
        return not self._receives and not self._sends

    def count(self, pieces: int) -> int:
        """Number of pieces that the first so many of the exchange arrive in."""
        return len(_steps(self.exchange.receives[:pieces], self.dtype.itemsize))

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the neighbours, and only with these; once, blocking.

        The first ``start`` calls it. Raises ``MismatchError`` on both sides if a neighbour connects
        another exchange, ``ExchangeTimeout`` if it does not come.
        """
        self._check()
        if self._connected:
            return
        receive = {lane.peer: lane for lane in self._receives}
        send = {lane.peer: lane for lane in self._sends}
        # What a peer must know: where its data goes, which flag announces it, which flag acknowledges.
        notes: dict[int, tuple[int, ...]] = {
            peer: (
                receive[peer].offset if peer in receive else -1,
                receive[peer].notification if peer in receive else -1,
                send[peer].notification if peer in send else -1,
                self.dtype.num,
            )
            for peer in self.exchange.peers
        }
        remotes = self._buffer.exchange(notes, self.name, self.exchange.fingerprint, timeout)
        for lane in self._sends:
            lane.remote = remotes[lane.peer]
            if lane.remote.note[3] != self.dtype.num:
                raise ShapeError(f"{self.name!r}: rank {lane.peer} moves another dtype than {self.dtype}")
            self._lay_out(lane, remotes[lane.peer].note[0])
        for lane in self._receives:
            lane.remote = remotes[lane.peer]
            slots = [self._slot(lane, parity) for parity in range(_SLOTS)]
            lane.views = tuple(_cut(slot, lane.pieces) for slot in slots)
        self._connected = True

    def cut(self, x: Array) -> list[Array]:
        """Views of ``x``, the local tensor of shape ``exchange.own.shape``: one per send, in order."""
        if x.shape != self._own_shape:
            raise ShapeError(f"{self.name!r}: local shape is {x.shape}, the plan has {self._own_shape}")
        return [x[slices] for slices in self._sent]

    def start(self, parts: Iterable[Array]) -> int:
        """Put one array per send into the peers' slots and notify; return the epoch.

        Returns without waiting for the transfer. The arrays may be changed on return.

        Raises
        ------
        ProtocolError
            If two epochs are already started and not received.
        ExchangeTimeout
            If a peer two epochs behind does not acknowledge in time.
        """
        self._check()
        if self._started - self._finished >= _SLOTS:
            raise ProtocolError(
                f"{self.name!r}: third start without a receive (epochs {self._finished + 1} and"
                f" {self._started} are in flight)"
            )
        if not self._connected:
            self.connect()
        epoch = self._started + 1
        self._manager.begin(self._operation, epoch)
        if self._manager.trace.recording is not None and self._receives:
            self._record(epoch)
        source = iter(parts)
        for lane in self._sends:
            # The slot is free again when the reader has acknowledged the epoch before the last.
            self._buffer.wait_flag(
                lane.notification,
                epoch - _SLOTS,
                lambda lane=lane: self._about(lane, epoch, "acknowledge"),  # type: ignore[misc]
            )
            step = 0
            for at, view in enumerate(lane.views[epoch % _SLOTS]):
                np.copyto(view, next(source), casting="equiv")
                if at == lane.ends[step] and step + 1 < len(lane.ends):
                    step += 1
                    self._announce_step(lane, epoch, step)
            self._announce(lane, epoch)
        self._started = epoch
        return epoch

    def ready(self, epoch: int) -> bool:
        """Whether everything of an epoch has arrived; does not block."""
        return all(self._buffer.flag(lane.notification) >= lane.risen(epoch) for lane in self._receives)

    def receive(self, epoch: int, timeout: float | None = None) -> Iterator[tuple[Piece, Array]]:
        """Yield the received pieces of an epoch in plan order, waiting for each; epochs in order.

        The arrays lie in the segment and are valid until the next piece is asked for: the slot is then
        acknowledged. The epoch counts as received when the iterator is exhausted; after a timeout the
        call can be repeated.
        """
        self._check()
        if not self._finished < epoch <= self._started or epoch != self._finished + 1:
            raise ProtocolError(
                f"{self.name!r}: epoch {epoch} cannot be received, started are {self._started},"
                f" received {self._finished}"
            )
        for lane in self._receives:
            begin, views = 0, lane.views[epoch % _SLOTS]
            for step, end in enumerate(lane.ends, 1):
                self._buffer.wait_flag(
                    lane.notification,
                    lane.risen(epoch, step),
                    lambda lane=lane: self._about(lane, epoch, "send"),  # type: ignore[misc]
                    timeout,
                )
                if epoch in self._flights:
                    self._flights[epoch]()
                yield from zip(lane.pieces[begin : end + 1], views[begin : end + 1], strict=True)
                begin = end + 1
            self._acknowledge(lane, epoch)
        for lane in self._sends:
            if lane.staged and lane.remote is not None:
                # Nothing would send this rank's notification on if it now left for something else.
                lane.remote.flush(timeout)
        self._finished = epoch
        self._flights.pop(epoch, None)

    def missing(self, epoch: int) -> Waiting:
        """Which peer an epoch still waits for; for messages."""
        for lane in self._receives:
            if self._buffer.flag(lane.notification) < lane.risen(epoch):
                return self._about(lane, epoch, "send")
        return Waiting((), f"in {self.name!r} (epoch {epoch}): everything has arrived")

    def void(self) -> None:
        """Give up one epoch, started or not, on all ranks of the exchange alike.

        For when every rank learned that the movement does not take place: what peers may have put for it
        is dropped. Each rank calls it exactly once for that epoch.
        """
        self._check()
        epoch = self._finished + 1
        if self._connected:
            for lane in self._receives:
                self._acknowledge(lane, epoch)
            for lane in self._sends:
                if lane.staged and lane.remote is not None:
                    # Acknowledged without being read: the put must be over before its memory is used again.
                    lane.remote.flush()
        self._started = self._finished = epoch
        self._flights.pop(epoch, None)

    def move(self, x: Array) -> Array:
        """Carry out the whole movement, ``y[box] += x[box]``; blocking. Returns an array of its own."""
        epoch = self.start(self.cut(x))
        return self.gather(x, epoch, np.add)

    def gather(self, x: Array, epoch: int, add: Callable[..., Any]) -> Array:
        """Receive an epoch into a new array of shape ``exchange.need.shape``; blocking.

        Own pieces first, then the received ones in plan order: the same sum from run to run.
        """
        need, own = self.exchange.need, self.exchange.own
        y = np.zeros(need.shape, self.dtype)
        for piece in self.exchange.local:
            y[piece.target.slices(need)] += x[piece.box.slices(own)]
        for piece, view in self.receive(epoch):
            target = y[piece.box.slices(need)]
            add(target, view, out=target)
        return y

    def close(self) -> None:
        """Give the memory back when no peer writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            if not self._manager.closed:
                self._manager.retire(self._buffer, self._quiet)

    def _quiet(self) -> bool:
        # A reader's acknowledgement is the last thing that it writes here.
        acknowledged = all(self._buffer.flag(lane.notification) >= self._started for lane in self._sends)
        return acknowledged and self._finished == self._started

    def _lay_out(self, lane: _Lane, offset: int) -> None:
        remote = lane.remote
        if remote is None:
            raise ProtocolError(f"{self.name!r}: not connected to rank {lane.peer}")
        count_ = lane.nbytes // self.dtype.itemsize
        there = [offset + parity * lane.stride for parity in range(_SLOTS)]
        direct = [remote.direct(self.dtype, count_, at) for at in there]
        slots = [self._slot(lane, p) if slot is None else slot for p, slot in enumerate(direct)]
        lane.views = tuple(_cut(slot, lane.pieces) for slot in slots)
        lane.staged = () if direct[0] is not None else tuple(slots)

    def _slot(self, lane: _Lane, parity: int) -> Array:
        count_ = lane.nbytes // self.dtype.itemsize
        return self._buffer.view(self.dtype, (count_,), lane.offset + parity * lane.stride)

    def _announce(self, lane: _Lane, epoch: int) -> None:
        if lane.remote is None:
            raise ProtocolError(f"{self.name!r}: not connected to rank {lane.peer}")
        offset, flag = lane.remote.note[0], lane.remote.note[1]
        if lane.staged:
            parity = epoch % _SLOTS
            lane.remote.put_stable(lane.staged[parity].view(np.uint8), offset + parity * lane.stride)
        else:
            self._manager.counters.puts += 1
            self._manager.counters.bytes_put += lane.nbytes
        lane.remote.raise_flag(flag, lane.risen(epoch))

    def _announce_step(self, lane: _Lane, epoch: int, step: int) -> None:
        # A message to another node travels as a whole.
        if lane.remote is not None and not lane.staged:
            lane.remote.raise_flag(lane.remote.note[1], lane.risen(epoch, step))

    def _record(self, epoch: int) -> None:
        # Every wait and the progress engine look whether it is there; ``receive`` at the latest.
        def over() -> bool:
            return self._closed or self._finished >= epoch or self.ready(epoch)

        self._flights[epoch] = self._manager.trace.watched("exchange", self.name, over)
        self._manager.defer(self._flights[epoch])

    def _acknowledge(self, lane: _Lane, epoch: int) -> None:
        if lane.remote is not None:
            lane.remote.acknowledge(lane.remote.note[2], epoch)

    def _about(self, lane: _Lane, epoch: int, verb: str) -> Waiting:
        # Of the data flag only whole epochs count; the flag of an acknowledgement counts nothing else.
        steps = len(lane.ends) if verb == "send" else 1
        seen = self._buffer.flag(lane.notification) // steps
        return Waiting(
            (lane.peer,),
            f"to {verb} in {self.name!r} (epoch {epoch}, last seen {seen})",
            "did every rank call the same layers?",
        )

    def _check(self) -> None:
        if self._closed or self._manager.closed:
            raise ClosedError(f"channel of {self.name!r}: already closed")


def _steps(pieces: tuple[Piece, ...], itemsize: int) -> tuple[Piece, ...]:
    """Pieces, the large ones cut along their first dimension; alike for whoever sends and receives them."""
    found = []
    for piece in pieces:
        count = -(-piece.box.volume * itemsize // _STEP_NBYTES)
        dim = next((d for d, extent in enumerate(piece.box.shape) if extent > 1), 0)
        if count <= 1:
            found.append(piece)
            continue
        start, stop = piece.box.bounds[dim]
        blocks = Balanced(stop - start, min(count, stop - start))
        for part in range(blocks.parts):
            low, high = blocks.interval(part)
            found.append(Piece(piece.peer, piece.box.replace(dim, start + low, start + high)))
    return tuple(found)


def _ends(pieces: tuple[Piece, ...], itemsize: int) -> tuple[int, ...]:
    """Last piece of each step of a message."""
    ends, nbytes = [], 0
    for at, piece in enumerate(pieces):
        nbytes += piece.box.volume * itemsize
        if nbytes >= _STEP_NBYTES:
            ends.append(at)
            nbytes = 0
    if not ends or ends[-1] != len(pieces) - 1:
        ends.append(len(pieces) - 1)
    return tuple(ends)


def _cut(slot: Array, pieces: tuple[Piece, ...]) -> tuple[Array, ...]:
    # A slot holds the pieces of one message one behind the other, each row-major.
    views, at = [], 0
    for piece in pieces:
        views.append(slot[at : at + piece.box.volume].reshape(piece.box.shape))
        at += piece.box.volume
    return tuple(views)

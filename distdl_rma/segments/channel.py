"""Channels execute an exchange, by two slots per message, an epoch counter and acknowledgements.

A message of four epochs, from its writer to its reader::

    epoch   writer                                      reader
    1       put into slot 1, data flag = 1   -------->  reads slot 1, ack flag = 1
    2       put into slot 0, data flag = 2   -------->  (computes)
    3       waits until the ack flag is 1
            put into slot 1, data flag = 3   -------->  (computes)
    4       waits until the ack flag is 2    <--------  reads slot 0, ack flag = 2

Epoch ``e`` uses slot ``e % 2``, so a writer is at most two epochs ahead of its reader, and no slot is written
while it is read. Flags only grow and are never reset, so a rank that looks late misses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ProtocolError, ShapeError
from distdl_rma.geometry.exchange import Exchange, Piece, fingerprint
from distdl_rma.segments.direct_receive import PostedResults, places_in_results, receives_directly
from distdl_rma.segments.lanes import LANDS, SLOTS, Lane, Lanes, in_steps
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.transport.arena import own_arena
from distdl_rma.segments.waiting.header import WaitReason

Array = NDArray[Any]


class Channel:
    """Executes one ``exchange`` of elements of a ``dtype`` repeatedly: ``start``, compute, ``receive``.

    Each ordered pair of peers has two slots and a data flag at the receiver, and an acknowledge flag at the
    sender. A start puts each piece into the peer's slot and notifies the peer; it waits only for a reader
    that is two epochs behind. Only ranks that exchange something communicate. Construction is local; the
    first start connects the peers.

    Memory: two slots per received message, and two staging areas per message to a rank out of reach;
    allocated at construction, freed after ``close()`` once no peer can write to it.

    ``sends`` and ``receives`` are the pieces of the exchange, large ones cut into parts, so that a reader
    begins before its writer has ended. Messages name the channel by ``name``. Channels are the exchange
    buffers of the interface document, sections 3.2, 3.2.1 and 3.2.2.

    With ``lands``, other ranks of the node put pieces of large results directly into memory in the arena of
    this process, which ``take_result`` returns; ``landed`` says so for each received piece.

    Between calls ``_finished <= _started <= _finished + 2``. The data flag of a lane is raised by the sender
    alone and the acknowledge flag by the receiver alone; each rank raises flags in the order of its epochs. A
    slot belongs to the sender from the acknowledgement of epoch e until the flag of epoch e + 2, and to the
    receiver otherwise. Pieces are yielded in plan order and not as they come, so that sums are reproducible.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> from distdl_rma.geometry import Decomposition, Exchange
    >>> ranks = machine.partition()
    >>> blocks = Decomposition.balanced(ranks, (4,))
    >>> gather = Exchange(machine.rank, blocks, Decomposition.replicated(ranks, (4,)))
    >>> channel = Channel(machine.segments, gather, np.float32, "gather")
    >>> channel.move(np.full(2, machine.rank, np.float32))
    array([0., 0., 1., 1.], dtype=float32)
    """

    def __init__(
        self, manager: SegmentManager, exchange: Exchange, dtype: DTypeLike, name: str, lands: bool = False
    ) -> None:
        self.exchange, self.dtype, self.name = exchange, np.dtype(dtype), name
        self._manager = manager
        link = manager.segment.link
        itemsize, arenas = self.dtype.itemsize, manager.segment.arenas
        lands = lands and receives_directly(exchange, itemsize, arenas.__contains__)
        arena = own_arena() if lands else None
        lanes = Lanes(exchange, itemsize, lambda peer: link(peer).memory is not None, arena is not None)
        self.sends, self.receives = lanes.sends, lanes.receives
        self._outgoing, self._incoming = lanes.outgoing, lanes.incoming
        self.landed = [lane.lands for lane in self._incoming for _ in lane.pieces]
        self._own_shape = exchange.own.shape
        self._cuts = [piece.box.slices(exchange.own) for piece in self.sends]
        self._buffer = manager.get_segment_buffer(lanes.nbytes, lanes.flags, name)
        self._posted: PostedResults | None = None
        if arena is not None:
            here = [lane for lane in self._incoming if lane.lands]
            self._posted = PostedResults(arena, self._buffer, here, exchange.need, self.dtype)
        self._flags, self._acquire = self._buffer.flags, manager.segment.acquire
        self._connected, self._operation = self.idle, manager.operation(name)
        # While a trace is recorded: by pending epoch, the function to call when all its pieces have arrived.
        self._recorded: dict[int, Callable[[], bool]] = {}
        self._started = self._finished = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the segment that the channel holds, without its flags."""
        return self._buffer.nbytes

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to exchange with anyone."""
        return not self._incoming and not self._outgoing

    def count(self, pieces: int) -> int:
        """Number of parts in which the first ``pieces`` received pieces of the exchange arrive."""
        return len(in_steps(self.exchange.receives[:pieces], self.dtype.itemsize))

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the peers, and with no other rank; once, blocking.

        The first ``start`` calls it. ``MismatchError`` on both sides if a peer connects another exchange or
        moves elements of another dtype. ``ExchangeTimeout`` if a peer does not connect in time: the call can
        be repeated.
        """
        self._check()
        if self._connected:
            return
        # For each peer: offset for its data, index of the data flag and of the acknowledge flag.
        facts = {peer: [-1, -1, -1] for peer in self.exchange.peers}
        for lane in self._incoming:
            facts[lane.peer][:2] = LANDS if lane.lands else lane.offset, lane.notification
        for lane in self._outgoing:
            facts[lane.peer][2] = lane.notification
        notes = {peer: tuple(numbers) for peer, numbers in facts.items()}
        terms = f"exchange={self.exchange.fingerprint:014x}\ndtype={self.dtype}"
        remotes = self._buffer.exchange(notes, self.name, fingerprint(terms), timeout, terms=terms)
        for lane in self._outgoing:
            remote, need = remotes[lane.peer], self.exchange.need_of(lane.peer)
            lane.bind_outgoing(remote, self._buffer, self.dtype)
            if lane.lands:
                arena = self._manager.segment.arenas[lane.peer]
                lane.places = places_in_results(remote, arena, lane.pieces, need, self.dtype)
        for lane in self._incoming:
            lane.bind_incoming(remotes[lane.peer], self._buffer, self.dtype)
        self._connected = True

    def cut(self, x: Any) -> list[Any]:
        """Views of ``x``, an array or tensor of shape ``exchange.own.shape``: one per send, in order."""
        if x.shape != self._own_shape:
            raise ShapeError(f"{self.name!r}: local shape is {x.shape}, the plan has {self._own_shape}")
        return [x[slices] for slices in self._cuts]

    def start(self, parts: Iterable[Array]) -> int:  # noqa: C901 - runs for every movement
        """Put one array per send into the peers' slots and notify the peers; return the epoch.

        Does not wait for the transfer. The arrays may be changed on return. ``ProtocolError`` if two started
        epochs are not received yet; ``ExchangeTimeout`` if a peer two epochs behind does not acknowledge in
        time: nothing was put then, and the call can be repeated. ``ShapeError`` if there are fewer arrays
        than sends: the call can be repeated with all of them.
        """
        if self._closed or self._manager.closed:
            self._check()
        if self._started - self._finished >= SLOTS:
            # If a failed rank interrupted the epochs, that is the error to raise.
            self._manager.notices.check()
            under_way = f"epochs {self._finished + 1} and {self._started} are in flight"
            raise ProtocolError(f"{self.name!r}: third start without a receive ({under_way})")
        if not self._connected:
            self.connect()
        epoch = self._started + 1
        self._manager.begin(self._operation, epoch)
        # A slot is free once its reader has acknowledged the epoch two before. All slots must be free before
        # the first one is written: if this wait ends in an error, no peer knows of this epoch.
        for lane in self._outgoing:
            if self._flags[lane.notification] < epoch - SLOTS:
                self._wait(lane, epoch - SLOTS, epoch, "acknowledge")
        self._acquire()
        if self._manager.trace.recording is not None and self._incoming:
            self._record(epoch)
        source, counters = iter(parts), self._manager.counters
        try:
            for lane in self._outgoing:
                step = 0
                views = lane.places(epoch) if lane.lands else lane.views[epoch % SLOTS]
                for at, view in enumerate(views):
                    lane.copy(view, next(source))
                    # A message to another node travels as a whole.
                    if not lane.staged and at == lane.ends[step] and step + 1 < len(lane.ends):
                        step += 1
                        lane.raise_data_flag((epoch - 1) * len(lane.ends) + step)
                if lane.staged:
                    lane.announce(epoch)
                else:
                    lane.raise_data_flag(epoch * len(lane.ends))
                    counters.puts += 1
                    counters.bytes_put += lane.nbytes
        except StopIteration:
            raise ShapeError(
                f"{self.name!r}: start takes one array per send, {len(self.sends)} on rank"
                f" {self._manager.rank}, and got fewer; Channel.cut makes them"
            ) from None
        self._started = epoch
        return epoch

    def ready(self, epoch: int) -> bool:
        """Whether all pieces of an epoch have arrived; does not block."""
        return all(self._buffer.flag(lane.notification) >= lane.flag_after(epoch) for lane in self._incoming)

    def take_result(self, epoch: int) -> Array | None:
        """Array that peers put pieces of a started epoch into; None if peers use slots.

        Once the epoch is received it belongs to the caller: nobody else writes to it, nor to views of it.
        """
        return None if self._posted is None else self._posted.take(epoch)

    def receive(self, epoch: int, timeout: float | None = None) -> Iterator[tuple[Piece, Array]]:
        """Yield the received pieces of an epoch in plan order, waiting for each; epochs in order.

        The arrays lie in the segment and are valid until the iterator is exhausted. Then all slots are
        acknowledged, and the epoch counts as received. After a timeout, or if an iterator was abandoned, the
        call can be repeated: it yields the same pieces from the first one on.

        ``ProtocolError`` if the epoch was not started, is not the next one, or was received meanwhile by
        another call; ``ExchangeTimeout`` if a peer does not send in time, or does not take this rank's puts.
        """
        self._check_next(epoch)
        manager = self._manager
        for lane in self._incoming:
            begin, views, before = 0, lane.views[epoch % SLOTS], (epoch - 1) * len(lane.ends)
            for step, end in enumerate(lane.ends, before + 1):
                if self._flags[lane.notification] < step:
                    self._wait(lane, step, epoch, "send", timeout)
                self._acquire()
                if epoch in self._recorded:
                    self._recorded[epoch]()
                yield from zip(lane.pieces[begin : end + 1], views[begin : end + 1], strict=True)
                begin = end + 1
                # A caller may resume an abandoned iterator after another one has received the epoch.
                if self._closed or manager.closed or self._finished != epoch - 1:
                    self._check_next(epoch)
        self._finish(epoch, timeout)

    def void(self) -> None:
        """Cancel the next epoch to receive, started or not; each rank of the exchange has to call it once.

        Layers start the movement of their last call before the ranks have agreed that this call is alike. If
        it is not, this takes the start back.

        For a movement that every rank knows will not take place; drops data that peers put. Blocks until this
        rank's own puts are complete; after a timeout the call can be repeated.
        """
        self._check()
        epoch = self._finished + 1
        if self._connected:
            if self._started < epoch:
                # Receivers keep their memory until this flag tells them that no more data comes.
                for lane in self._outgoing:
                    lane.raise_data_flag(lane.flag_after(epoch))
            self._finish(epoch)
        self._started, self._finished = max(self._started, epoch), epoch

    def move(self, x: Array) -> Array:
        """Carry out the whole movement, ``y[box] += x[box]``, into a new array; blocking."""
        epoch = self.start(self.cut(x))
        return self.gather(x, epoch, np.add)

    def gather(self, x: Array, epoch: int, add: Callable[..., Any]) -> Array:
        """Receive an epoch into a new array of shape ``exchange.need.shape``; blocking.

        Adds own pieces first, then the received ones in plan order, so that sums are reproducible.
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
        """Free the memory once no peer writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            # After a failure peers may still put to results: the manager then keeps the channel for ever.
            if not self._manager.closed or self._manager.notices.any_failed:
                self._manager.retire(self._buffer, self._is_left_alone)

    def _is_left_alone(self) -> bool:
        # The last write of a reader is an acknowledgement. The last write of a sender is a data flag: after
        # its data, or without data if the epoch was cancelled, perhaps later than this rank's own ``void``.
        # Peers without this rank's addresses never write.
        flag = self._buffer.flag
        return not self._connected or (
            self._finished == self._started
            and all(flag(lane.notification) >= self._started for lane in self._outgoing)
            and all(flag(lane.notification) >= lane.flag_after(self._finished) for lane in self._incoming)
        )

    def _finish(self, epoch: int, timeout: float | None = None) -> None:
        # If this rank makes no further call here, nothing else sends its notification. And a put that a peer
        # in ``void`` acknowledged unread must be complete before the slot is written again.
        for lane in self._outgoing:
            if lane.staged:
                lane.remote.flush(timeout)
        # Last, because after a timeout above the caller can receive the pieces again.
        if self._posted is not None:
            self._posted.finish(epoch)
        for lane in self._incoming:
            lane.acknowledge(epoch)
        self._finished = epoch
        self._recorded.pop(epoch, None)

    def _record(self, epoch: int) -> None:
        # Every wait and the progress engine check whether the epoch has arrived, at the latest ``receive``.
        def over() -> bool:
            return self._closed or self._finished >= epoch or self.ready(epoch)

        self._recorded[epoch] = self._manager.trace.watched("exchange", self.name, over)
        self._manager.defer(self._recorded[epoch])

    def _wait(self, lane: Lane, value: int, epoch: int, verb: str, timeout: float | None = None) -> None:
        """Wait until the flag of a lane reaches ``value``; messages say that the peer has to ``verb``."""
        flags, at = self._flags, lane.notification
        # The message counts whole epochs; the data flag counts steps, the acknowledge flag epochs.
        steps = len(lane.ends) if verb == "send" else 1

        def reason() -> WaitReason:
            what = f"to {verb} in {self.name!r} (epoch {epoch}, last seen {flags[at] // steps})"
            return WaitReason((lane.peer,), what, "did every rank call the same layers?", in_step=True)

        self._manager.waiter.until(lambda: flags[at] >= value, reason, timeout)

    def _check(self) -> None:
        if self._closed or self._manager.closed:
            raise self._manager.closed_error(f"channel of {self.name!r}")

    def _check_next(self, epoch: int) -> None:
        if self._closed or self._manager.closed:
            self._check()
        if epoch != self._finished + 1 or epoch > self._started:
            self._manager.notices.check()
            known = f"started are {self._started}, received {self._finished}"
            raise ProtocolError(f"{self.name!r}: epoch {epoch} cannot be received, {known}")

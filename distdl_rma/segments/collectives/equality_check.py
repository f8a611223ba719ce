"""Comparison of four integers over some ranks, in messages of a cache line; a barrier compares one.

Memory of the first rank of a node, its leader; a board for even and one for odd epochs::

    board 0    line of rank 0    a b c d epoch . . .                a cache line, written by one rank
               line of rank 1    a b c d epoch . . .
               result            a b c d  a b c d  epoch            smallest and largest, of all nodes
    board 1    ...
    marks      of rank 0, of rank 1, ...                            1: reads the boards no more
    slots      board 0: turn 0, turn 1, ...  board 1: ...           from leaders of other nodes

On one node a rank fills its line and looks at all lines; result and slots are not used. Everybody reads the
whole board, which is cheaper than a rank that reads it for all and tells them: a message less in a row.
Between nodes a rank waits for the result, which its leader stores after the last turn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import DistdlError, ExchangeTimeout, MismatchError, ProtocolError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.trees import dissemination
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.collectives.scripted import Scripted
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.heap import aligned
from distdl_rma.segments.waiting.header import WaitReason

N_INTEGERS = 4
_ROW = struct.Struct(f"={N_INTEGERS}q")
# Words of a line of the board: the integers of a rank, the epoch, and a rest. It keeps two ranks from writing
# to one cache line, which would go back and forth between their cores. The smallest and the largest integers
# of all ranks take two lines, with the epoch behind them.
_LINE, _RESULT = 8, 16
_EPOCH = N_INTEGERS
_PARITIES = 2
_ITEM = 8
# Most ranks of other nodes whose headers are read for a message.
_LOOKED_UP = 64

_Extent = NDArray[np.int64]


class _Board(NamedTuple):
    """The board of even or of odd epochs."""

    table: NDArray[np.int64]
    # Its lines, since a few words are read faster from a memoryview than from an array.
    lines: list[memoryview]
    # This rank's line as words, and as the bytes that ``_ROW`` fills.
    mine: memoryview
    row: memoryview
    result: NDArray[np.int64]


class _Turn(NamedTuple):
    """A turn between nodes: ranks that this one sends to and receives from, each with the receiver's slot."""

    targets: tuple[tuple[int, int], ...]
    sources: tuple[tuple[int, int], ...]


class EqualityCheck(Scripted):
    """Comparison of four integers of every rank: whether all ranks have the same, else the extremes of each.

    On a node every rank stores its integers in a line of one board, in the memory of the node's first rank,
    and reads the whole board: one message per rank, and no rank has to act for another. The first ranks of
    several nodes exchange the smallest and largest integers by dissemination, and then store them for their
    nodes: O(log N) messages per node for N nodes, which every wait and the progress engine advance.

    Construction is local. ``ranks``, which include this one, their order, ``name`` and ``terms``, a line
    ``name=value`` for each fact, are equal on all ranks; the first start connects, and is collective. An
    epoch has to be waited for before the next one starts. Nothing is acknowledged: a rank starts epoch k+2
    after all ranks have started k+1, and so have finished k. So a line of epoch k is written again only when
    nobody reads it any more. The board is freed once all ranks of the node have closed: a rank may return
    from its last wait while others still read.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str, terms: str = "") -> None:
        super().__init__(manager)
        self._manager, self.name, self.ranks = manager, name, tuple(ranks)
        self._terms = f"{terms}\nranks={self.ranks}"
        self._layout = layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        self._leader, self._number = layout.here[0], len(layout.here)
        self._at, self._leads = layout.here.index(layout.me), layout.me == self._leader
        self._turns = turns_between_leaders(layout)
        self._slots = sum(len(turn.sources) for turn in self._turns)
        board = self._number * _LINE + _RESULT
        # Behind the boards: marks of the ranks of the node that read them no more.
        marks = aligned(self._number * _ITEM)
        nbytes = _PARITIES * _ITEM * (board + self._slots * _RESULT) + marks if self._leads else 0
        self._board_words, self._marks = board, np.zeros(0, np.int64)
        self._memory = manager.get_segment_buffer(nbytes, self._slots, name)
        # Earlier users of the memory may have left epochs there.
        self._memory.array[:] = 0
        self._remotes: dict[int, RemoteBuffer] = {}
        self._fence, self._acquire = manager.segment.fence, manager.segment.acquire
        self._counters = manager.counters
        # By parity, once connected.
        self._boards: list[_Board] = []
        # Of the ranks of other nodes those whose headers are read for the message of a barrier.
        self._elsewhere = [rank for rank in self.ranks if rank not in layout.here][:_LOOKED_UP]
        # Ranks that the step between nodes waits for, and the comparison that messages name.
        self._silent: tuple[int, ...] = ()
        self._for, self._closed = name, False
        # The smallest of each integer, then the largest; None if all ranks have the same integers.
        self._extent: _Extent | None = None
        self._values: tuple[int, ...] = (0,) * N_INTEGERS
        self.epoch = self._waited = 0
        # Whether a wait for this epoch ended before all ranks had started, so that its call may be repeated.
        self._repeatable = False

    def connect(self, timeout: float | None = None, name: str = "") -> None:
        """Exchange addresses on the node, and with O(log N) other nodes, once; collective, blocking.

        Errors begin with ``name``, the comparison that connects, if there is one.
        """
        if self._boards:
            return
        if self._closed or self._manager.closed:
            raise self._unusable()
        layout = self._layout
        near = layout.others_here if self._leads else (self._leader,)
        far = (rank for turn in self._turns for rank, _ in (*turn.targets, *turn.sources))
        peers = dict.fromkeys((*near, *far), ())
        plan = fingerprint("equality check", self._terms)
        try:
            self._remotes = self._memory.exchange(peers, self.name, plan, timeout, terms=self._terms)
        except (ExchangeTimeout, MismatchError) as error:
            error.args = (f"{name!r}: {error}" if name else str(error),)
            raise
        self._remotes[layout.me] = self._memory.here
        self._see(self._remotes[self._leader])

    def _see(self, leader: RemoteBuffer) -> None:
        size, count = _PARITIES * self._board_words, self._number * _LINE
        words = leader.direct(np.int64, size + self._number, 0)
        if words is None:
            raise ProtocolError(f"{self.name!r}: rank {self._leader} is on another node")
        self._marks = words[size:]
        for board in words[:size].reshape(_PARITIES, -1):
            table = board[:count].reshape(self._number, _LINE)
            lines, mine = [line.data for line in table], table[self._at].data
            self._boards.append(_Board(table, lines, mine, mine.cast("B"), board[count:]))

    def start(self, name: str, *words: int) -> int:
        """Announce four integers of 64 bits; does not wait. The first start connects, which blocks.

        Messages call the comparison ``name``. Returns the number of the epoch, for ``wait``. After a timeout
        of ``wait``, an equal start continues its epoch. If another epoch was not waited for, as in a call
        that all ranks refused, this call waits for it first; a later ``wait`` for it raises.
        """
        if self._closed or self.broken or self._manager.closed:
            raise self._unusable()
        if self.epoch != self._waited:
            if self._repeatable and (name, words) == (self._for, self._values):
                return self.epoch
            self._finish(self.epoch, None)
        if not self._boards:
            self.connect(name=name)
        self._for, self._values, self._repeatable = name, words, False
        self.epoch = epoch = self.epoch + 1
        board = self._boards[epoch & 1]
        _ROW.pack_into(board.row, 0, *words)
        # The epoch becomes visible after the integers: a reader that sees it sees these.
        self._fence()
        board.mine[_EPOCH] = epoch
        if not self._leads:
            self._counters.puts += 1
            self._counters.bytes_put += _ROW.size
        if len(self._layout.nodes) > 1:
            self._running = self._script(epoch)
            self._manager.defer(self.advance)
            self.advance()
        return epoch

    def wait(self, timeout: float | None = None, epoch: int | None = None) -> bool:
        """Return whether all ranks announced the same integers; blocking until all have started.

        ``epoch`` is the number that ``start`` returned, that of the last start if None. ``ProtocolError`` if
        another epoch was started since then.
        """
        if self._closed or self.broken or self._manager.closed:
            raise self._unusable()
        if epoch is not None and epoch != self.epoch:
            raise ProtocolError(f"{self.name!r}: epoch {epoch} was overtaken, by {self._for!r}")
        self._repeatable = True
        self._finish(self.epoch, timeout)
        if self._extent is not None:
            self._explain()
        self._waited, self._repeatable = self.epoch, False
        return self._extent is None

    def meet(self, timeout: float | None = None, number: int = 0) -> int:
        """A barrier: wait until all ranks have called, and return the largest number of any rank; blocking.

        It does not order puts: only ranks that were notified of an earlier put see it after the barrier.
        ``ExchangeTimeout`` at the deadline names ranks that have not come. The call can be repeated, and then
        the number of the first call counts. Meanwhile this rank counts as having come.
        """
        self.connect(timeout)
        if self.epoch == self._waited:
            if self._elsewhere:
                # What ranks of other nodes read that wait for this one.
                self._manager.begin(self._manager.operation(self.name), self.epoch + 1)
            self.start(self.name, number, 0, 0, 0)
        self.wait(timeout)
        return self.largest[0]

    def _explain(self) -> None:
        # For subclasses: what ranks that differ do before the epoch is over.
        pass

    def _finish(self, epoch: int, timeout: float | None) -> None:
        until, missing = self._manager.waiter.until, self.missing
        if len(self._layout.nodes) > 1:
            if not self.advance():
                until(self.advance, missing, timeout)
            self._manager.withdraw(self.advance)
        else:
            if not self._board_is_full(epoch):
                until(lambda: self._board_is_full(epoch), missing, timeout)
            self._acquire()
            self._extent = self._extent_here(epoch)

    @property
    def smallest(self) -> tuple[int, ...]:
        """The smallest value of each integer in the last epoch, over all ranks."""
        return self._values if self._extent is None else tuple(self._extent[:N_INTEGERS].tolist())

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest value of each integer."""
        return self._values if self._extent is None else tuple(self._extent[N_INTEGERS:].tolist())

    def missing(self) -> WaitReason:
        """Ranks that have not started the epoch, for messages."""
        epoch = self.epoch
        here = zip(self._layout.here, self._boards[epoch & 1].lines, strict=True)
        late = tuple(rank for rank, line in here if line[_EPOCH] < epoch)
        what, calls = (
            f"to send in {self._for!r} (epoch {epoch}, last seen {epoch - 1})",
            "call the same layers",
        )
        if self._for == self.name:
            what, calls = f"to reach {self.name!r} (epoch {epoch})", "make the same calls"
            has_begun = self._manager.watch.has_begun
            late += tuple(rank for rank in self._elsewhere if not has_begun(rank, self.name, epoch))
        return WaitReason(late or self._silent, what, f"did every rank {calls}?", in_step=True)

    def close(self) -> None:
        """Free the memory once no rank writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            if not self._manager.closed:
                self._is_over()
                self._manager.retire(self._memory, self._idle)

    def _idle(self) -> bool:
        # The others may still read the last epoch.
        read = not self._leads or bool(self._marks.all())
        return self._is_over() and read and all(remote.delivered() for remote in self._remotes.values())

    def _is_over(self) -> bool:
        # Whether this rank reads the board no more; if so, marks this for the node's first rank.
        over = self.advance()
        if over and len(self._marks):
            self._fence()
            self._marks[self._at] = 1
            if not self._leads:
                # Once only: the node's first rank may free the memory now.
                self._marks = self._marks[:0]
        return over

    def _unusable(self) -> DistdlError:
        if self._closed or self._manager.closed:
            return self._manager.closed_error(f"equality check {self.name!r}")
        return ProtocolError(f"{self.name!r}: epoch {self.epoch} was interrupted by {self.broken}")

    def _board_is_full(self, epoch: int) -> bool:
        board = self._boards[epoch & 1]
        return all(line[_EPOCH] >= epoch for line in board.lines)

    def _extent_here(self, epoch: int) -> _Extent | None:
        # The smallest and largest integers on a full board; None if all lines are equal.
        board = self._boards[epoch & 1]
        if not self._leads:
            self._counters.gets += 1
            self._counters.bytes_got += self._number * _ROW.size
        if all(line == board.mine for line in board.lines):
            return None
        values = board.table[:, :N_INTEGERS]
        return np.concatenate([values.min(0), values.max(0)])

    def _script(self, epoch: int) -> Iterator[None]:
        # An epoch over several nodes; yields while it has to wait.
        result = self._boards[epoch & 1].result
        if self._leads:
            while not self._board_is_full(epoch):
                yield
            self._acquire()
            extent = self._extent_here(epoch)
            found = np.array([*self._values, *self._values] if extent is None else extent, np.int64)
            for turn in self._turns:
                yield from self._take(turn, epoch, found)
            result[: _EPOCH * 2] = found
            self._fence()
            result[_EPOCH * 2] = epoch
            # The caller may go on in a call of MPI, in which nothing would send what is still queued here.
            while not all(remote.delivered() for remote in self._remotes.values()):
                yield
        else:
            self._silent = (self._leader,)
            while result[_EPOCH * 2] < epoch:
                yield
            self._acquire()
            found = result[: _EPOCH * 2].copy()
            self._counters.gets += 1
            self._counters.bytes_got += found.nbytes
        alike = bool((found[:N_INTEGERS] == found[N_INTEGERS:]).all())
        self._extent = None if alike else found

    def _take(self, turn: _Turn, epoch: int, found: _Extent) -> Iterator[None]:
        # Sends the smallest and largest integers known so far to some nodes, and receives those of others.
        # Minima may be taken twice, so a turn need not know which nodes they cover; a sum could not.
        sent = found.copy().view(np.uint8)
        for rank, slot in turn.targets:
            remote = self._remotes[rank]
            remote.put_stable(sent, self._offset(epoch, slot, remote))
            remote.raise_flag(slot, epoch)
        for rank, slot in turn.sources:
            self._silent = (rank,)
            while self._memory.flag(slot) < epoch:
                yield
            self._acquire()
            there = self._memory.view(np.int64, (2 * N_INTEGERS,), self._offset(epoch, slot))
            np.minimum(found[:N_INTEGERS], there[:N_INTEGERS], out=found[:N_INTEGERS])
            np.maximum(found[N_INTEGERS:], there[N_INTEGERS:], out=found[N_INTEGERS:])

    def _offset(self, epoch: int, slot: int, remote: RemoteBuffer | None = None) -> int:
        # Slots lie at the end of a leader's memory, whose board may be longer than that of this rank.
        nbytes = self._memory.nbytes if remote is None else remote.nbytes
        return nbytes - _ITEM * _RESULT * (_PARITIES * self._slots - (epoch & 1) * self._slots - slot)


def turns_between_leaders(layout: NodeLayout) -> tuple[_Turn, ...]:
    """Turns between nodes in which this rank takes part; none if it leads no node. Local, without MPI.

    Of leaders 0, 1 and 2, each a node, leader 0 has one turn with two slots:

    >>> nodes = ((0,), (1,), (2,))
    >>> turns_between_leaders(NodeLayout((0, 1, 2), nodes, 0))
    (_Turn(targets=((1, 0), (2, 1)), sources=((2, 0), (1, 1))),)
    """
    leaders = layout.leaders(layout.ranks[0])
    if layout.me not in leaders:
        return ()
    size, me, first = len(leaders), leaders.index(layout.me), 0
    turns = []
    for distances in dissemination(size):
        targets = tuple((leaders[(me + d) % size], slot) for slot, d in enumerate(distances, first))
        sources = tuple((leaders[(me - d) % size], slot) for slot, d in enumerate(distances, first))
        turns.append(_Turn(targets, sources))
        first += len(distances)
    return tuple(turns)

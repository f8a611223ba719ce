"""Collectives of a group whose ranks are on several nodes: MPI moves bytes, the ranks reduce them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distdl_rma.geometry.intervals import Balanced
from distdl_rma.process_group.node_slots import CALL_BYTES, DIGEST_BYTES, Call, call_mismatch, check_pairs
from distdl_rma.process_group.reducers import Reducer
from distdl_rma.segments.collectives.between_nodes import Messages, Plan, Script, in_pieces, slices
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.waiting.header import WaitReason

# Bytes of all ranks in one turn of a long vector. While one turn travels, the one before is reduced or
# stored: the memory beside the tensors is a few times this.
TURN_BYTES = 8 << 20
_BYTE = np.dtype(np.uint8)


class InterNodeCollectives:
    """Scripts as those of :class:`NodeCollectives`, by MPI's collectives on one communicator.

    At the begin of a call the ranks compare what they call. Every element is reduced on one rank, in the
    order of the ranks.
    """

    def __init__(self, messages: Messages, me: int, name: str) -> None:
        self._messages, self.ranks, self.name = messages, messages.ranks, name
        self.size, self.me = len(self.ranks), me
        self.call = Call("nothing")

    def waiting(self) -> WaitReason:
        """Which ranks this one waits for, as far as it knows."""
        others = tuple(rank for at, rank in enumerate(self.ranks) if at != self.me)
        what = f"in {self.call.text} of group {self.name!r}"
        return WaitReason(others, what, "did every rank make the same calls?")

    def barrier(self) -> Script:
        """Wait for all."""
        yield from self._agree()

    def reduce(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        """Reduce a vector in place, on all ranks if there is no root; else the others' stay as they are."""
        yield from self._agree()
        turns = -(-x.nbytes // TURN_BYTES)
        yield from in_pieces(self.chunk(x[at], reducer, root) for at in slices(x.size, turns))

    def chunk(self, x: Array, reducer: Reducer, root: int | None) -> Plan:
        """Reduce a part of a vector in place: each rank reduces a share of it, and sends the result."""
        counts = Balanced(x.size, self.size).lengths
        rows, script = self.exchanged(x, counts)
        yield script
        reduced, taken = np.empty(rows.shape[1], x.dtype), [count * x.itemsize for count in counts]
        reducer.reduce(list(rows), reduced)
        # Frees the memory before the result has travelled.
        del rows
        if root is None:
            yield self._messages.gather_all(reduced, x, taken)
        else:
            yield self._collected(reduced, x, taken, root)

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reducer) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        yield from self._agree()
        most = max(1, TURN_BYTES // out.itemsize // self.size)

        def plan(begin: int) -> Plan:
            cut = [part[begin : begin + most] for part in parts]
            rows, script = self.exchanged(np.concatenate(cut), [part.size for part in cut])
            yield script
            reducer.reduce(list(rows), out[begin : begin + most])

        yield from in_pieces(map(plan, range(0, max(part.size for part in parts), most)))

    def exchanged(self, x: Array, counts: Sequence[int]) -> tuple[Array, Script]:
        """Send so many elements to every rank; return the rows that come here, complete after the script."""
        rows = np.empty((self.size, counts[self.me]), x.dtype)
        sent, taken = [count * x.itemsize for count in counts], [rows[0].nbytes] * self.size
        return rows, self._messages.exchange(x, sent, rows.reshape(-1), taken)

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Copy the data of some ranks to all ranks, or to one ``reader``."""
        yield from self._agree()
        most = TURN_BYTES // self.size

        def plan(begin: int) -> Plan:
            part, counts = mine[begin : begin + most], window(sizes, begin, most)
            taken = np.empty(sum(counts) if reader in (None, self.me) else 0, _BYTE)
            if reader is None:
                yield self.gathered(part, taken, counts)
            else:
                yield self._collected(part, taken, counts, reader)
            if taken.size:
                store(taken, counts, outs, begin)

        yield from in_pieces(map(plan, range(0, max(sizes), most)))

    def gathered(self, part: Array, taken: Array, counts: Sequence[int]) -> Script:
        """Copy the bytes of all ranks to all ranks, one behind the other."""
        filled = [at for at, count in enumerate(counts) if count]
        if len(filled) != 1:
            return self._messages.gather_all(part, taken, counts)
        if self.me == filled[0]:
            taken[...] = part
        return self.given(taken, filled[0])

    def given(self, data: Array, root: int) -> Script:
        """Copy the bytes of one rank to all ranks."""
        return self._messages.broadcast(data, root)

    def _collected(self, part: Array, taken: Array, counts: Sequence[int], root: int) -> Script:
        # Copy the bytes of all ranks to one, one behind the other.
        sent = [part.nbytes if at == root else 0 for at in range(self.size)]
        wanted = counts if root == self.me else [0] * self.size
        return self._messages.exchange(part, sent, taken, wanted)

    def deal(self, sends: Sequence[Array], outs: Sequence[Array]) -> Script:
        """Give each rank what this one has for it; ``outs`` takes what every rank has for this one."""
        yield from self._agree()
        lengths = np.array([*(send.size for send in sends), *(out.size for out in outs)], np.int64)
        table = np.empty((self.size, lengths.size), np.int64)
        yield from self._messages.gather_all(lengths, table.reshape(-1), [lengths.nbytes] * self.size)
        check_pairs(self, table[:, : self.size], table[:, self.size :].T)
        most, sizes = TURN_BYTES // self.size, [out.size for out in outs]

        def plan(begin: int) -> Plan:
            cut, counts = [send[begin : begin + most] for send in sends], window(sizes, begin, most)
            taken, given = np.empty(sum(counts), _BYTE), [part.size for part in cut]
            yield self._messages.exchange(np.concatenate(cut), given, taken, counts)
            store(taken, counts, outs, begin)

        yield from in_pieces(map(plan, range(0, int(table.max()), most)))

    def _agree(self) -> Script:
        # All ranks make the same call, or all raise.
        row = np.frombuffer(self.call.digest, np.int64)
        table = np.empty((self.size, row.size), np.int64)
        yield from self._messages.gather_all(row, table.reshape(-1), [DIGEST_BYTES] * self.size)
        others = (table != row).any(1)
        if others.any():
            encoded = np.zeros(CALL_BYTES, _BYTE)
            encoded[: len(self.call.encoded)] = np.frombuffer(self.call.encoded, _BYTE)
            all_encoded = np.empty((self.size, CALL_BYTES), _BYTE)
            yield from self._messages.gather_all(encoded, all_encoded.reshape(-1), [CALL_BYTES] * self.size)
            other = int(np.argmax(others))
            raise call_mismatch(self, other, all_encoded[other].tobytes())


def window(sizes: Sequence[int], begin: int, most: int) -> list[int]:
    """Of vectors of some sizes, how much each has of at most so many elements from ``begin``."""
    return [max(0, min(size - begin, most)) for size in sizes]


def store(taken: Array, counts: Sequence[int], outs: Sequence[Array | None], begin: int) -> None:
    """Store vectors that lie one behind the other to those with targets, from ``begin``."""
    at = 0
    for out, count in zip(outs, counts, strict=True):
        if out is not None and count:
            out[begin : begin + count] = taken[at : at + count]
        at += count

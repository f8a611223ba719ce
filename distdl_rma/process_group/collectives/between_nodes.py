"""Collectives of a group whose ranks are on several nodes: MPI carries bytes, this rank reduces them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import MismatchError
from distdl_rma.process_group.collectives.calls import DIGEST_BYTES, SAID_BYTES, Call, text_said
from distdl_rma.process_group.collectives.reducers import Reducer
from distdl_rma.segments.messages import Messages, Test
from distdl_rma.segments.waiting.header import WaitReason

Array = NDArray[Any]
Script = Iterator[None]

# Bytes of all ranks in one turn of a long vector: what is taken beside the tensors.
TURN_BYTES = 8 << 20
_BYTE = np.dtype(np.uint8)


class WideCollectives:
    """Scripts of collectives as of :class:`NodeCollectives`, by MPI's collectives on one communicator.

    A call begins with a word of every rank, by which all know that all call the same. Every element is
    reduced on one rank, in the order of the ranks.
    """

    def __init__(self, messages: Messages, me: int, name: str) -> None:
        self._messages, self.ranks, self.name = messages, messages.ranks, name
        self.size, self.me = len(self.ranks), me
        self.call = Call("nothing")

    def waiting(self) -> WaitReason:
        """Which ranks are waited for, as far as this one knows."""
        others = tuple(rank for at, rank in enumerate(self.ranks) if at != self.me)
        what = f"in {self.call.text} of group {self.name!r}"
        return WaitReason(others, what, "did every rank make the same calls?")

    def barrier(self) -> Script:
        """Wait for all."""
        yield from self._agree()

    def all_reduce(self, x: Array, reducer: Reducer) -> Script:
        """Reduce a vector in place, on all ranks."""
        return self._reduce(x, reducer, None)

    def reduce(self, x: Array, reducer: Reducer, root: int) -> Script:
        """Reduce a vector in place, on one rank; the others' stay as they are."""
        return self._reduce(x, reducer, root)

    def _reduce(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        yield from self._agree()
        yield from self.reduced(x, reducer, root)

    def reduced(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        """Reduce a vector in place, on all ranks or one, that are known to call the same."""
        size, me = self.size, self.me
        turns = -(-x.nbytes // TURN_BYTES)
        share = -(-x.size // (max(turns, 1) * size))
        for turn in range(turns):
            chunk = x[turn * size * share : (turn + 1) * size * share]
            counts = [
                len(range(*slice(at * share, (at + 1) * share).indices(chunk.size))) for at in range(size)
            ]
            rows = np.empty((size, counts[me]), x.dtype)
            mine = [counts[me] * x.itemsize] * size
            sent = [count * x.itemsize for count in counts]
            yield from _over(self._messages.exchange(chunk, sent, rows.reshape(-1), mine))
            reduced = np.empty(counts[me], x.dtype)
            reducer.reduce(list(rows), reduced)
            target = chunk if root in (None, me) else chunk[:0]
            if root is None:
                yield from _over(self._messages.gather_all(reduced, target, sent))
            else:
                to_root = [mine[0] if at == root else 0 for at in range(size)]
                taken = sent if root == me else [0] * size
                yield from _over(self._messages.exchange(reduced, to_root, target, taken))

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reducer) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        yield from self._agree()
        most = max(1, TURN_BYTES // out.itemsize // self.size)
        for begin in range(0, max(part.size for part in parts), most):
            cut = [part[begin : begin + most] for part in parts]
            counts = [part.size for part in cut]
            yield from self.reduced_part(np.concatenate(cut), counts, out[begin : begin + most], reducer)

    def reduced_part(self, x: Array, counts: Sequence[int], out: Array, reducer: Reducer) -> Script:
        """Reduce a vector of so many elements for each rank; ``out`` gets this rank's."""
        rows = np.empty((self.size, out.size), out.dtype)
        sent, taken = [count * x.itemsize for count in counts], [out.nbytes] * self.size
        yield from _over(self._messages.exchange(x, sent, rows.reshape(-1), taken))
        reducer.reduce(list(rows), out)

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Give what ranks have to all, or to one ``reader``."""
        yield from self._agree()
        most = TURN_BYTES // self.size
        for begin in range(0, max(sizes), most):
            counts = [len(range(begin, min(size, begin + most))) for size in sizes]
            sent = [counts[self.me] if at == reader else 0 for at in range(self.size)]
            counts = counts if reader in (None, self.me) else [0] * self.size
            taken, part = np.empty(sum(counts), _BYTE), mine[begin : begin + most]
            if reader is None:
                yield from self.gathered(part, taken, counts)
            else:
                yield from _over(self._messages.exchange(part, sent, taken, counts))
            self._store(taken, counts, outs, begin)

    def gathered(self, part: Array, taken: Array, counts: Sequence[int]) -> Script:
        """Give the bytes of all ranks to all, one behind the other."""
        filled = [at for at, count in enumerate(counts) if count]
        if len(filled) != 1:
            return _over(self._messages.gather_all(part, taken, counts))
        if self.me == filled[0]:
            taken[...] = part
        return self.given(taken, filled[0])

    def given(self, data: Array, root: int) -> Script:
        """Give the bytes of one rank to all."""
        yield from _over(self._messages.broadcast(data, root))

    def deal(self, sends: Sequence[Array], outs: Sequence[Array]) -> Script:
        """Give each rank what this one has for it; ``outs`` takes what every rank has for this one."""
        yield from self._agree()
        lengths = np.array([*(send.size for send in sends), *(out.size for out in outs)], np.int64)
        table = np.empty((self.size, lengths.size), np.int64)
        yield from _over(self._messages.gather_all(lengths, table.reshape(-1), [lengths.nbytes] * self.size))
        sent, wanted = table[:, : self.size], table[:, self.size :].T
        wrong = np.argwhere(sent != wanted)
        if wrong.size:
            source, target = wrong[0].tolist()
            raise MismatchError(
                f"group {self.name!r}: {self.call.text}: rank {self.ranks[source]} has"
                f" {sent[source, target]} bytes for rank {self.ranks[target]}, which expects"
                f" {wanted[source, target]}"
            )
        most = TURN_BYTES // self.size
        for begin in range(0, int(table.max()), most):
            cut = [send[begin : begin + most] for send in sends]
            counts = [out[begin : begin + most].size for out in outs]
            taken = np.empty(sum(counts), _BYTE)
            given = [part.size for part in cut]
            yield from _over(self._messages.exchange(np.concatenate(cut), given, taken, counts))
            self._store(taken, counts, outs, begin)

    def _store(self, taken: Array, counts: Sequence[int], outs: Sequence[Array | None], begin: int) -> None:
        at = 0
        for out, count in zip(outs, counts, strict=True):
            if out is not None and count:
                out[begin : begin + count] = taken[at : at + count]
            at += count

    def close(self) -> None:
        """Give the communicator back, if nothing is under way."""
        self._messages.close()

    def _agree(self) -> Script:
        # The same call on all ranks, or an error on all.
        row = np.frombuffer(self.call.digest, np.int64)
        table = np.empty((self.size, row.size), np.int64)
        yield from _over(self._messages.gather_all(row, table.reshape(-1), [DIGEST_BYTES] * self.size))
        others = (table != row).any(1)
        if others.any():
            said = np.zeros(SAID_BYTES, _BYTE)
            said[: len(self.call.said)] = np.frombuffer(self.call.said, _BYTE)
            all_said = np.empty((self.size, SAID_BYTES), _BYTE)
            yield from _over(self._messages.gather_all(said, all_said.reshape(-1), [SAID_BYTES] * self.size))
            other = int(np.argmax(others))
            raise MismatchError(
                f"group {self.name!r}: rank {self.ranks[self.me]} calls {self.call.text}, but rank"
                f" {self.ranks[other]} calls {text_said(all_said[other].tobytes())}: all ranks of a group"
                " make the same calls in the same order, with tensors of the same sizes and types"
            )


def _over(test: Test) -> Script:
    while not test():
        yield

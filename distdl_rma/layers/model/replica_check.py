"""Checks that parameters and buffers stay equal on all ranks: every call compares a small part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_, sub
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn

from distdl_rma.layers.checks.arguments import mark_compared
from distdl_rma.layers.dtypes import digest, is_readable
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.staging import down
from distdl_rma.layers.sync.gradient_groups import gradient_groups_of, under
from distdl_rma.segments.machine import Machine

# Number of tensors of which one call compares a word each; number of calls that compare every byte once.
_AT_A_TIME, _CALLS = 32, 512
_LEAST_NBYTES, _WORD = 4 << 10, 8
# After so many comparisons that found equal tensors, differences between version counters are ignored.
_FRUITLESS = 4
_version: Callable[[torch.Tensor], int] = attrgetter("_version")
_learns: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_address = torch.Tensor.data_ptr


class _Held(NamedTuple):
    # A tensor, and the module's dictionary that it is in.
    name: str
    table: dict[str, Any]
    key: str
    tensor: torch.Tensor


class _Group:
    """Some tensors of a model, with views of their memory."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self._tables, self._keys = [each.table for each in held], [each.key for each in held]
        self._tensors = [each.tensor for each in held]
        self._addresses = [*map(_address, self._tensors)]
        self.nbytes = [*map(_bytes_of, self._tensors)]
        words = [each[: len(each) // _WORD * _WORD].cast("Q") or each for each in self.nbytes]
        self._words = [(each, len(each)) for each in words]

    def is_there(self) -> bool:
        """Whether the model still has these tensors at these addresses; other memory must not be read."""
        now = map(dict.get, self._tables, self._keys)
        return all(map(is_, now, self._tensors)) and [*map(_address, self._tensors)] == self._addresses

    def word(self, at: int) -> int:
        """Hash of one word of each tensor; another ``at`` selects other words."""
        return hash(tuple([words[at % length] for words, length in self._words]))


class ReplicaSampler:
    """Checks that ranks hold equal replicas of a model: parameters and buffers that each of them has. Local.

    A call of the model compares ``number()`` with the other ranks: in the first call a hash of every byte.
    Later it covers which parameters learn; how often each was written to in place, so that the next call
    finds a change by one rank alone; a word of each of 32 tensors, of others in the next call, which finds
    changes of all of a tensor, as by another learning rate; and a part of all bytes, all of them in about 512
    calls. If numbers differ, ranks compare ``words()``, which cover everything. Of tensors on a device it
    keeps what the first call has read: later calls compare how often each was written to, and no bytes.
    """

    what = "weights"

    def __init__(self, model: Callable[[], nn.Module | None], machine: Machine, ranks: Sequence[int]) -> None:
        self._model, self._machine, self._ranks = model, machine, tuple(ranks)
        self._calls = self._fruitless = 0
        self._held: list[_Held] = []

    def number(self) -> int:
        """Hash for the call that begins; local."""
        at, self._calls = self._calls, self._calls + 1
        if at == 0:
            self._look()
        if not self._groups:
            return 0
        if at == 0:
            every = [crc32(part) for group in self._groups for part in group.nbytes]
            return hash((*every, *map(_learns, self._parameters)))
        group, written = self._group(at % len(self._groups)), 0
        if self._fruitless < _FRUITLESS:
            written = hash((*map(sub, map(_version, self._parameters), self._versions),))
        learns = hash((*map(_learns, self._parameters),))
        return hash((written, learns, group.word(at // len(self._groups)), self._part()))

    def words(self) -> dict[str, list[str]]:
        """Digest and norm of each tensor, by name."""
        self._look()
        return {each.name: [_digest(each.tensor), _said(each.tensor)] for each in self._held}

    def problem(self, words: Mapping[int, Any]) -> str:
        """Message about tensors that differ between ranks; empty if all are equal."""
        names = dict.fromkeys(name for each in words.values() for name in each)
        differing = [n for n in names if len({each.get(n, [0])[0] for each in words.values()}) > 1]
        if not differing:
            self._fruitless += 1
            return ""
        first, *others = differing
        values = "; ".join(f"rank {rank}: {each.get(first, [0, 'none'])[1]}" for rank, each in words.items())
        more = f", nor {'is' if len(others) == 1 else 'are'} {len(others)} more" if others else ""
        return (
            f"{first!r} is not alike on all ranks ({values}){more}: did one of them load,"
            " initialise or change it alone, or has its optimizer other settings? Do that on all ranks, or"
            " close() and distribute() again, which takes what the first rank has"
        )

    def forget(self) -> None:
        """Forget the tensors, so that others may compare them; the next number begins anew."""
        for each in self._held:
            mark_compared(each.tensor, False)
        self._held, self._calls, self._fruitless = [], 0, 0

    def _look(self) -> None:
        # Find all tensors and their memory again.
        for each in self._held:
            mark_compared(each.tensor, False)
        self._held = [*self._found()]
        for each in self._held:
            mark_compared(each.tensor, True)
        self._groups = [
            _Group(self._held[at : at + _AT_A_TIME]) for at in range(0, len(self._held), _AT_A_TIME)
        ]
        self._parameters = [each.tensor for each in self._held if isinstance(each.tensor, nn.Parameter)]
        # Earlier writes may differ: the first rank does not write to a tensor that it broadcasts.
        self._versions = [*map(_version, self._parameters)]
        total = sum(len(part) for group in self._groups for part in group.nbytes)
        self._step = max(_LEAST_NBYTES, -(-total // _CALLS))
        # The tensor, and the byte in it, at which the next call goes on.
        self._at = self._offset = 0

    def _found(self) -> Iterator[_Held]:
        seen: set[int] = set()
        model = self._model()
        for group in () if model is None else gradient_groups_of(model, "", self._machine, {}):
            if not set(self._ranks) <= set(group.ranks):
                # Parts of weights, or weights that the user's callback keeps differently.
                continue
            places: list[tuple[str, dict[str, Any], str]] = [
                (entry.name, entry.uses[0][0]._parameters, entry.uses[0][1]) for entry in group.entries
            ]
            for path, part in group.parts:
                if not isinstance(part, DistributedLayer):
                    places += [(under(path, key), part._buffers, key) for key in part._buffers]
            for name, table, key in places:
                x = table.get(key)
                if x is not None and id(x) not in seen and _readable(x):
                    seen.add(id(x))
                    yield _Held(name, table, key, x)

    def _group(self, at: int) -> _Group:
        if not self._groups[at].is_there():
            self._look()
        return self._groups[at % len(self._groups)] if self._groups else _Group(())

    def _part(self) -> int:
        # Hash of bytes from where the last call ended; goes on in the following tensors.
        found, left, seen = 0, self._step, -1
        parts: Sequence[memoryview] = ()
        while left > 0:
            # One look-up serves many small tensors.
            if (at := self._at // _AT_A_TIME) != seen:
                seen, parts = at, self._group(at).nbytes
            if not parts:
                break
            part = parts[self._at % _AT_A_TIME][self._offset : self._offset + left]
            found, left = crc32(part, found), left - len(part)
            self._offset += len(part)
            if left > 0:
                self._at, self._offset = self._at + 1, 0
                if self._at == len(self._held):
                    # The next call begins at the first tensor.
                    self._at = 0
                    break
        return found


def _readable(x: torch.Tensor) -> bool:
    # Whether it is a plain tensor whose elements fill one piece of memory, in any order.
    if type(x) not in (torch.Tensor, nn.Parameter) or not is_readable(x):
        return False
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() > 0 and last + 1 == x.numel() and not (x.is_conj() or x.is_neg())


def _bytes_of(x: torch.Tensor) -> memoryview:
    flat = x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
    return (flat if flat.is_cpu else down(flat)).numpy().data


def _digest(x: torch.Tensor) -> str:
    # Of all that must be equal: with other shapes or types the same bytes are another tensor.
    return f"{tuple(x.shape)} {x.dtype} {x.requires_grad} {digest(x)}"


def _said(x: torch.Tensor) -> str:
    norm = torch.linalg.vector_norm(x.detach().to(torch.complex128 if x.is_complex() else torch.float64))
    frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
    return f"{tuple(x.shape)} of norm {float(norm):.9g}{frozen}"

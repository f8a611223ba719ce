"""Whether parameters and buffers are still alike on all ranks: a little of them is compared in every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter, is_, sub
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn

from distdl_rma.checks.arguments import mark_compared
from distdl_rma.dtypes import as_words, is_in_memory
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.machine import Machine
from distdl_rma.sync.claims import claims_of, under

# Tensors of which one call compares a word each, and in how many calls every byte is compared.
_AT_A_TIME, _CALLS = 32, 512
_LEAST_NBYTES, _WORD = 4 << 10, 8
# So often all was alike although only some ranks had written to it, before that is no sign any more.
_FRUITLESS = 4
_version: Callable[[torch.Tensor], int] = attrgetter("_version")
_learns: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_address = torch.Tensor.data_ptr


class _Held(NamedTuple):
    # A tensor, and the dictionary of a module that it is in.
    name: str
    table: dict[str, Any]
    key: str
    tensor: torch.Tensor


class _Group:
    """Some tensors of a model, and their memory as it is."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self._tables, self._keys = [each.table for each in held], [each.key for each in held]
        self._tensors = [each.tensor for each in held]
        self._addresses = [*map(_address, self._tensors)]
        self.nbytes = [*map(_bytes_of, self._tensors)]
        words = [each[: len(each) // _WORD * _WORD].cast("Q") or each for each in self.nbytes]
        self._words = [(each, len(each)) for each in words]

    def is_there(self) -> bool:
        """Whether the model still has them all, and where they were: nothing else may be read."""
        now = map(dict.get, self._tables, self._keys)
        return all(map(is_, now, self._tensors)) and [*map(_address, self._tensors)] == self._addresses

    def word(self, at: int) -> int:
        """Of a word of each, others for another number."""
        return hash(tuple([words[at % length] for words, length in self._words]))


class ReplicaSampler:
    """Whether ranks hold equal replicas of a model: parameters and buffers that each of them has.

    ``number()`` is a number that a call of the model compares with those of the other ranks. It is of

    - every byte, in the first call;
    - which parameters learn;
    - how often each parameter was written to in place: what one rank does alone, by a function of torch such
      as ``load_state_dict``, is seen in the next call;
    - a word of each of 32 tensors, of others in the next call: what changes all of a tensor, as another rate
      of an optimizer does, is seen once its turn has come;
    - a part of all bytes, so that each was compared after some 512 calls.

    Where the numbers differ, ``words()`` are of everything. Local to make; does not keep the model.
    """

    what = "weights"

    def __init__(self, model: Callable[[], nn.Module | None], machine: Machine, ranks: Sequence[int]) -> None:
        self._model, self._machine, self._ranks = model, machine, tuple(ranks)
        self._calls = self._fruitless = 0
        self._held: list[_Held] = []

    def number(self) -> int:
        """Number of this rank for the call that begins; local."""
        at, self._calls = self._calls, self._calls + 1
        if at == 0:
            self._look()
        if not self._groups:
            return 0
        if at == 0:
            every = [crc32(part) for group in self._groups for part in group.nbytes]
            return hash((*every, *map(_learns, self._parameters)))
        group = self._group(at % len(self._groups))
        written = 0
        if self._fruitless < _FRUITLESS:
            written = hash((*map(sub, map(_version, self._parameters), self._versions),))
        learns = hash((*map(_learns, self._parameters),))
        return hash((written, learns, group.word(at // len(self._groups)), self._part()))

    def words(self) -> dict[str, list[str]]:
        """A digest and a norm of each tensor, by name."""
        self._look()
        return {each.name: [_digest(each.tensor), _said(each.tensor)] for each in self._held}

    def problem(self, said: Mapping[int, Any]) -> str:
        """Which tensor is not alike on all ranks; empty if all are."""
        names = dict.fromkeys(name for each in said.values() for name in each)
        differing = [n for n in names if len({each.get(n, [0])[0] for each in said.values()}) > 1]
        if not differing:
            self._fruitless += 1
            return ""
        first, *others = differing
        values = "; ".join(f"rank {rank}: {each.get(first, [0, 'none'])[1]}" for rank, each in said.items())
        more = f", nor {'is' if len(others) == 1 else 'are'} {len(others)} more" if others else ""
        return (
            f"{first!r} is not alike on all ranks ({values}){more}: did one of them load,"
            " initialise or change it alone, or has its optimizer other settings? Do that on all ranks, or"
            " close() and distribute() again, which takes what the first rank has"
        )

    def forget(self) -> None:
        """Leave the tensors to whoever else compares them; the next number begins anew."""
        for each in self._held:
            mark_compared(each.tensor, False)
        self._held, self._calls, self._fruitless = [], 0, 0

    def _look(self) -> None:
        # Where everything is now.
        for each in self._held:
            mark_compared(each.tensor, False)
        self._held = [*self._found()]
        for each in self._held:
            mark_compared(each.tensor, True)
        self._groups = [
            _Group(self._held[at : at + _AT_A_TIME]) for at in range(0, len(self._held), _AT_A_TIME)
        ]
        self._parameters = [each.tensor for each in self._held if isinstance(each.tensor, nn.Parameter)]
        # Ranks need not have written equally often before: what was broadcast, the first has not.
        self._versions = [*map(_version, self._parameters)]
        total = sum(len(part) for group in self._groups for part in group.nbytes)
        self._step = max(_LEAST_NBYTES, -(-total // _CALLS))
        # The tensor, and the byte in it, that the next call goes on with.
        self._at = self._offset = 0

    def _found(self) -> Iterator[_Held]:
        seen: set[int] = set()
        model = self._model()
        for claim in () if model is None else claims_of(model, "", self._machine, {}):
            if not set(self._ranks) <= set(claim.ranks):
                # Parts of weights, or what its user keeps otherwise.
                continue
            places: list[tuple[str, dict[str, Any], str]] = [
                (entry.name, entry.uses[0][0]._parameters, entry.uses[0][1]) for entry in claim.entries
            ]
            for path, part in claim.parts:
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
        # Bytes from where the last call ended; of the tensors behind it where one has fewer.
        found, left, seen = 0, self._step, -1
        parts: Sequence[memoryview] = ()
        while left > 0:
            # Once for many small ones.
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
                    # From the first on in the next call.
                    self._at = 0
                    break
        return found


def _readable(x: torch.Tensor) -> bool:
    # A plain tensor, whose elements fill a piece of memory: in some order, alike on all ranks.
    if type(x) not in (torch.Tensor, nn.Parameter) or not is_in_memory(x):
        return False
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() > 0 and last + 1 == x.numel() and not (x.is_conj() or x.is_neg())


def _bytes_of(x: torch.Tensor) -> memoryview:
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def _digest(x: torch.Tensor) -> str:
    words = as_words(x.detach().contiguous())
    return (
        f"{tuple(x.shape)} {x.dtype} {x.requires_grad} {blake2b(words.tobytes(), digest_size=16).hexdigest()}"
    )


def _said(x: torch.Tensor) -> str:
    norm = torch.linalg.vector_norm(x.detach().to(torch.complex128 if x.is_complex() else torch.float64))
    frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
    return f"{tuple(x.shape)} of norm {float(norm):.9g}{frozen}"

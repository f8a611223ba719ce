"""What a backward began at: by which functions its split tensors came from what models returned.

Functions outside of every model are called without a word to other ranks, and by some of them alone, to print
something. What matters is that all ranks go backward from the same: a number of it is compared with the next
call of a model.
"""

from __future__ import annotations

from cmath import isnan
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from distdl_rma.checks.arguments import TENSORS, number_of, plainly, sample, spoken
from distdl_rma.checks.calls import by_ranks, first_difference
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import is_synchronised
from distdl_rma.split.calls.table import name_of

# What asks, or what its user knows.
_UNFOLLOWED = frozenset({"query", "value", "gradient", "registered"})
_RECENT = 256
_LARGE, _MASK = 1 << 40, (1 << 62) - 1
# What users may say of which the hash would be that of something else, or another on each rank.
_MINUS_ONE, _NAN, _NONE = -(1 << 39) - 1, -(1 << 39) - 3, -(1 << 39) - 5
_MEANT = {_MINUS_ONE: -1, _NAN: float("nan"), _NONE: None}
_INEXACT = frozenset({float, complex})
_NUMBERS = _INEXACT | {int, bool}
# Backwards of one step that are told of.
_FEW = 8
# Elements of what is computed of parameters.
_SOME = 16


class _Names(dict[Any, int]):
    """A number of each function and text that was met, alike on all ranks, and larger than what users say."""

    def __missing__(self, what: Any) -> int:
        text = what if isinstance(what, str) else name_of(what)
        found = self[what] = crc32(text.encode()) + _LARGE
        return found


class LossOrigin:
    """Follows the functions of split tensors outside of models; one of a process."""

    def __init__(self) -> None:
        # How many models compare it.
        self.on = 0
        self._names = _Names()
        # Of the last results: number, function, and numbers of all arguments.
        self._recent: deque[tuple[int, Any, list[Any]]] = deque(maxlen=_RECENT)

    def begin(self, machine: Machine) -> None:
        """Follow them for a model of a machine, all ranks of which do so; what was before is not compared.

        Until then some ranks alone may have followed them, for a model that others had closed.
        """
        self.on += 1
        for backwards in machine.kept.get("backwards", {}).values():
            backwards.forget()

    def follow(
        self, kind: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Number a result by the function and its arguments."""
        if kind in _UNFOLLOWED:
            return
        told = [self._names[function], torch.is_grad_enabled()]
        for argument in args:
            # A split tensor has a number, and a type.
            way = getattr(argument, "_loss_hash", None)
            told.append(self._told(argument) if way is None else way)
        for key, argument in kwargs.items():
            if argument is not None and argument is not False:
                told += self._names[key], self._told(argument)
        # Without texts, whose hash differs between processes.
        number = hash(tuple(told)) & _MASK | _LARGE
        self._recent.append((number, function, told))
        # What writes to a slice changes its first argument.
        changed: Any = args[:1] if result is None else result
        if changed.__class__ in TENSORS:
            changed._loss_hash = number
        elif isinstance(changed, (tuple, list)):
            for at, each in enumerate(changed):
                if each.__class__ in TENSORS:
                    each._loss_hash = number if at == 0 else hash((number, at)) & _MASK | _LARGE
                    self._recent.append((each._loss_hash, function, told))

    def _told(self, argument: Any) -> Any:
        kind = argument.__class__
        if kind in _NUMBERS:
            # Python gives -1 the hash of -2, and each object that is NaN another.
            nan = kind in _INEXACT and isnan(argument)
            return _NAN if nan else argument if argument != -1 else _MINUS_ONE
        if kind is str:
            return self._names[argument]
        if kind in TENSORS:
            way = getattr(argument, "_loss_hash", None)
            return _number_of(argument) if way is None else way
        if isinstance(argument, (tuple, list)):
            return tuple([self._told(one) for one in argument])
        return _NONE if argument is None else self._told(plainly(argument))

    def begins_backward(self, ends: Sequence[Any]) -> None:
        """Note where a backward begins that all ranks of a partition go."""
        for x in ends if self.on else ():
            layout = getattr(x, "_layout", None)
            if layout is not None and isinstance(layout.partition.home, Machine):
                Backwards.of(layout.partition.home, layout.partition.ranks).add(x._loss_hash)

    def described(self, ends: Sequence[int]) -> list[str]:
        """The calls that led to results of these numbers, for messages."""
        wanted, seen, found = {*ends}, {0}, list[str]()
        for number, function, told in reversed(self._recent):
            if number in wanted - seen:
                seen.add(number)
                wanted.update(_large(told))
                found.append(name_of(function) + spoken([*map(self._said, told[2:])]))
        return found[::-1]

    def _said(self, told: Any) -> Any:
        # For messages.
        if isinstance(told, tuple):
            return (*map(self._said, told),)
        if not isinstance(told, int) or abs(told) < _LARGE:
            return _MEANT.get(told, told)
        return next((what for what, number in self._names.items() if number == told), ...)


class Backwards:
    """Backwards of some ranks of a machine: where they began is equal on all of these. Local."""

    what = "backwards"

    def __init__(self) -> None:
        self.forget()

    @classmethod
    def of(cls, machine: Machine, ranks: tuple[int, ...]) -> Backwards:
        """Those of these ranks."""
        kept: dict[tuple[int, ...], Backwards] = machine.kept.setdefault("backwards", {})
        found = kept.get(ranks)
        if found is None:
            found = kept[ranks] = cls()
        return found

    def forget(self) -> None:
        """Begin anew."""
        # A number of all; where those began that were not asked for yet, and the last that were.
        self._number, self._new, self._last = 0, list[int](), list[int]()

    def add(self, way: int) -> None:
        """Note one that begins at a result of this number."""
        self._number = number_of(way, self._number)
        self._new = [*self._new[-_FEW:], way]

    def number(self) -> int:
        """Of where all began so far; words are of those since the number was asked for before."""
        self._last, self._new = self._new, []
        return self._number

    def words(self) -> list[Any]:
        """The number, and the calls that led to where the last began."""
        return [self._number, LOSS_ORIGIN.described(self._last)]

    def problem(self, said: Mapping[int, Any]) -> str:
        """How ranks came to where their last backward began, if not alike; begins anew then."""
        if len({number for number, _ in said.values()}) == 1:
            return ""
        self.forget()
        at = first_difference(ways := [way for _, way in said.values()])
        if at is None:
            told = "of other plain tensors, as labels, of what was computed of weights, or without a graph"
        else:
            calls = [f"calls {way[at] if at < len(way) else 'nothing more'}" for way in ways]
            told = by_ranks(dict(zip(said, calls, strict=True)))
        return (
            f"the backward before this call began at what the ranks computed in different ways:"
            f" {told}. The gradients were of neither; do labels or factors of a loss depend on the rank?"
        )


def _number_of(x: torch.Tensor) -> int:
    # What is computed of parameters may be rounded otherwise; the model's own it compares itself.
    if not x.requires_grad:
        return sample(x) + _LARGE
    if is_synchronised(x) or x.numel() > _SOME:
        return _LARGE
    values = " ".join([f"{value:.3g}" for value in x.detach().reshape(-1).tolist()])
    return crc32(values.encode()) + _LARGE


def _large(told: Any) -> Iterator[int]:
    # Numbers of tensors, and of texts.
    for one in told:
        if isinstance(one, tuple):
            yield from _large(one)
        elif isinstance(one, int) and abs(one) >= _LARGE:
            yield one


LOSS_ORIGIN = LossOrigin()

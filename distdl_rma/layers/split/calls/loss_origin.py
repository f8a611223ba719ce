"""Hash how split tensors were computed from a model's outputs, so that ranks can compare their losses.

Functions outside of models exchange nothing for a comparison, and some ranks may call them alone, to print a
value. But all ranks must begin a backward at the same tensor. The next call of a model compares their hashes.

    y = model(x)                 hash of the model's output: alike on all ranks, since its call was compared
    z = y * 2                    hash(mul, hash of y, 2)
    loss = mse_loss(z, target)   hash(mse_loss, hash of z, checksum of elements of target)
    loss.backward()              the hash of loss is added to the starts of backwards (:class:`Backwards`)
    model(x)                     compares the starts so far, in the message that begins the call

So labels of another batch on one rank are found one step later, and the message names the call in which the
hashes differ first, from the last few results that are kept. A hash is one number: small numbers in arguments
stand for themselves, so that a message can show them; hashes of tensors and texts are larger than these.
"""

from __future__ import annotations

from cmath import isnan
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import finalize
from zlib import crc32

import torch

from distdl_rma.layers.checks.arguments import (
    TENSORS,
    as_comparable,
    checksum,
    described_arguments,
    sample_of,
)
from distdl_rma.layers.checks.model_calls import by_ranks, first_difference
from distdl_rma.layers.ops.core.autograd import is_synchronised
from distdl_rma.layers.split.calls.table import name_of
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.virtual_ranks.turns import of_each_rank

# Kinds that are not hashed: queries of a tensor, and rules of users.
_UNFOLLOWED = frozenset({"query", "value", "gradient", "registered"})
_RECENT = 256
_LARGE, _MASK = 1 << 40, (1 << 62) - 1
# Stand-ins for -1, NaN and None: Python's hash of these equals another value's, or differs between ranks.
_MINUS_ONE, _NAN, _NONE = -(1 << 39) - 1, -(1 << 39) - 3, -(1 << 39) - 5
_MEANT = {_MINUS_ONE: -1, _NAN: float("nan"), _NONE: None}
_INEXACT = frozenset({float, complex})
_NUMBERS = _INEXACT | {int, bool}
# Backwards of one step that messages describe.
_FEW = 8
# Up to so many elements, tensors that are computed of parameters are hashed.
_SOME = 16


class _Names(dict[Any, int]):
    """Hash of each function and text, equal on all ranks, and larger than numbers in users' arguments."""

    def __missing__(self, what: Any) -> int:
        text = what if isinstance(what, str) else name_of(what)
        found = self[what] = crc32(text.encode()) + _LARGE
        return found


class LossOrigin:
    """Hashes the results of functions of split tensors outside of models; one object per process."""

    def __init__(self) -> None:
        # The id of each open model that compares the hashes.
        self.on: list[int] = of_each_rank()
        self._names = _Names()
        # For the last results: hash, function, and hashes of all arguments.
        self._recent: deque[tuple[int, Any, list[Any]]] = deque(maxlen=_RECENT)

    def begin(self, machine: Machine, model: object) -> Callable[[], object]:
        """As ``follow_for``, for a model on a machine, on all its ranks; discards earlier backwards.

        Some ranks alone may have hashed results before, for a model that other ranks had closed.
        """
        for backwards in machine.kept.get("backwards", {}).values():
            backwards.forget()
        return self.follow_for(model)

    def follow_for(self, model: object) -> Callable[[], object]:
        """Hash results until the model is gone, or what this returns is called."""
        self.on.append(id(model))
        end = finalize(model, self._end, id(model))
        end.atexit = False
        return end

    def _end(self, model: int) -> None:
        if model in self.on:
            self.on.remove(model)

    def follow(
        self, kind: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Hash a result from the function and its arguments."""
        if kind in _UNFOLLOWED:
            return
        hashes = [self._names[function], torch.is_grad_enabled(), *map(self._hash_of, args)]
        for key, argument in kwargs.items():
            if argument is not None and argument is not False:
                hashes += self._names[key], self._hash_of(argument)
        # A hash of numbers only: Python's hash of a text differs between processes.
        number = hash(tuple(hashes)) & _MASK | _LARGE
        # A function that writes to a slice returns None, and changes its first argument.
        changed: Any = args[:1] if result is None else result
        for at, each in enumerate(changed if isinstance(changed, (tuple, list)) else (changed,)):
            if each.__class__ in TENSORS:
                each._loss_hash = number if at == 0 else hash((number, at)) & _MASK | _LARGE
                self._recent.append((each._loss_hash, function, hashes))

    def _hash_of(self, argument: Any) -> Any:
        kind = argument.__class__
        if kind in _NUMBERS:
            # Python hashes -1 as -2, and NaN by the object.
            nan = kind in _INEXACT and isnan(argument)
            return _NAN if nan else argument if argument != -1 else _MINUS_ONE
        if kind is str:
            return self._names[argument]
        if kind in TENSORS:
            # A split tensor has its hash as an attribute, like a plain tensor that was computed of one.
            known = getattr(argument, "_loss_hash", None)
            return _number_of(argument) if known is None else known
        if isinstance(argument, (tuple, list)):
            return tuple([self._hash_of(one) for one in argument])
        return _NONE if argument is None else self._hash_of(as_comparable(argument))

    def begins_backward(self, ends: Sequence[Any]) -> None:
        """Note a backward that begins at ``ends``; a plain tensor among these is not compared."""
        for x in ends if self.on else ():
            layout = getattr(x, "_layout", None)
            if layout is not None and isinstance(layout.partition.home, Machine):
                Backwards.of(layout.partition.home, layout.partition.ranks).add(x._loss_hash)

    def described(self, ends: Sequence[int]) -> list[tuple[str, int]]:
        """The calls that led to results with these hashes, for messages, each with its own hash."""
        wanted, seen, found = {*ends}, {0}, list[tuple[str, int]]()
        for number, function, hashes in reversed(self._recent):
            if number in wanted - seen:
                seen.add(number)
                wanted.update(_large(hashes))
                said = name_of(function) + described_arguments([*map(self._value_of, hashes[2:])])
                found.append((said, number))
        return found[::-1]

    def _value_of(self, hashed: Any) -> Any:
        # A value from its hash, for messages.
        if isinstance(hashed, tuple):
            return (*map(self._value_of, hashed),)
        if not isinstance(hashed, int) or abs(hashed) < _LARGE:
            return _MEANT.get(hashed, hashed)
        return next((what for what, number in self._names.items() if number == hashed), ...)


class Backwards:
    """Where backwards on some ranks of a machine began; must be equal on all of these. Local.

    A :class:`~distdl_rma.layers.checks.model_calls.Check`: models compare ``number`` when a call begins.
    """

    what = "backwards"

    def __init__(self) -> None:
        self.forget()

    @classmethod
    def of(cls, machine: Machine, ranks: tuple[int, ...]) -> Backwards:
        """The object of these ranks, made on the first call."""
        kept: dict[tuple[int, ...], Backwards] = machine.kept.setdefault("backwards", {})
        return kept.setdefault(ranks, cls())

    def forget(self) -> None:
        """Discard all noted backwards."""
        # Hash of all starts; the starts since ``number`` was called; the starts before that call.
        self._number, self._new, self._last = 0, list[int](), list[int]()

    def add(self, start: int) -> None:
        """Note a backward that begins at a result with this hash."""
        self._number = checksum(start, self._number)
        self._new = [*self._new[-_FEW:], start]

    def number(self) -> int:
        """Hash of all starts so far, to compare; ``words`` then describes the starts since the last call."""
        self._last, self._new = self._new, []
        return self._number

    def words(self) -> list[Any]:
        """The hash, the calls that led to the last starts, and the hashes of these."""
        return [self._number, *zip(*LOSS_ORIGIN.described(self._last), strict=True)]

    def problem(self, words: Mapping[int, Any]) -> str:
        """Message if the ranks' backwards began differently, which also discards them; empty otherwise."""
        if len({number for number, *_ in words.values()}) == 1:
            return ""
        self.forget()
        texts, hashes = ([each[at] if len(each) > at else () for each in words.values()] for at in (1, 2))
        if (at := first_difference(texts)) is not None:
            calls = [f"calls {each[at] if at < len(each) else 'nothing more'}" for each in texts]
            found = by_ranks(dict(zip(words, calls, strict=True)))
        else:
            at = first_difference(hashes)
            where = f"{texts[0][at]} got" if at is not None else "it was computed from"
            found = (
                f"{where} plain tensors, such as labels, class weights or a mask, that differ, or a graph on"
                " some ranks only"
            )
        return (
            f"the loss of the step before this call differs between the ranks: {found}. So its gradients are"
            " those of no loss. All ranks must use the same labels and factors, whole"
        )


def _number_of(x: torch.Tensor) -> int:
    # Values that are computed of parameters may be rounded differently. A model compares its own parameters.
    if not x.requires_grad:
        return crc32(sample_of(x)) + _LARGE
    if is_synchronised(x) or x.numel() > _SOME:
        return _LARGE
    values = " ".join([f"{value:.3g}" for value in x.detach().reshape(-1).tolist()])
    return crc32(values.encode()) + _LARGE


def _large(hashes: Any) -> Iterator[int]:
    # Hashes of tensors, functions and texts.
    for one in hashes:
        if isinstance(one, tuple):
            yield from _large(one)
        elif isinstance(one, int) and abs(one) >= _LARGE:
            yield one


LOSS_ORIGIN = LossOrigin()

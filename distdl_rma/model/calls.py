"""Calls of a distributed model: begun alike by all ranks, gone through by the same way, and ended alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Protocol
from zlib import crc32

import torch

from distdl_rma.checks.arguments import are_apart, values_of
from distdl_rma.checks.consensus import Consensus, gather_words
from distdl_rma.errors import (
    ClosedError,
    DistdlError,
    ExchangeTimeout,
    MismatchError,
    PeerFailedError,
    SegmentError,
)
from distdl_rma.machine import Machine
from distdl_rma.split.calls.loss_origin import LOSS_ORIGIN

_BEGUN, _ENDED, _RAISED = range(3)
# So long a rank that raises waits for the others to raise the same, before it tells them that it failed.
_GRACE_SECONDS = 1.0
# What peers wait for in vain, or know already.
_KNOWN = PeerFailedError, ClosedError
_AT_ONCE = ExchangeTimeout, SegmentError


class Word(Protocol):
    """A part of a rank's way through a model."""

    @property
    def word(self) -> int:
        """A number, alike on ranks that do the same."""
        ...

    @property
    def described(self) -> str:
        """For messages."""
        ...


class Way(Protocol):
    """A rank's way through a model."""

    def __len__(self) -> int: ...

    @property
    def number(self) -> int:
        """Of all of it, alike on ranks that went the same."""
        ...

    @property
    def calls(self) -> Sequence[Word]:
        """Its parts."""
        ...

    @property
    def number_of_plain(self) -> int:
        """Of the plain tensors that its functions were given."""
        ...

    @property
    def plain(self) -> Sequence[tuple[int, str, tuple[int, ...], str, bytes]]:
        """These: the number of the part, type and shape, and elements with their type."""
        ...


class Drawn:
    """That random numbers were drawn in a call, from a state of torch's generator."""

    def __init__(self, state: torch.Tensor) -> None:
        self.word = crc32(bytes(state.numpy()))

    @property
    def described(self) -> str:
        """For messages."""
        return (
            f"for random numbers of torch's generator, in state {self.word:08x} when it began; seed it alike"
            " on all ranks, and draw what is of one rank from a generator of its own"
        )


class Calls:
    """What the ranks of a distributed model tell each other when a call begins and ends; blocking, small.

    Nobody begins a call before all others do, so what a rank sends in one call cannot be taken for part of
    another. At its end all of them know whether they went the same way through the model; a rank that raises
    tells those that do not.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int], name: str) -> None:
        self._machine, self.ranks, self._name = machine, tuple(ranks), name
        self._consensus, self._title = Consensus.of(machine.segments, self.ranks), f"calls of {name}"
        self._open = False

    def begin(
        self,
        facts: tuple[int, ...],
        described: Callable[[], str],
        sign: int = 0,
        difference: Callable[[], str] = str,
    ) -> None:
        """Begin a call; ``MismatchError`` on all ranks if facts differ, which are then described.

        ``sign`` is of what may be alike though it differs: then ``difference`` says what is not, alike on all
        ranks, which may be nothing.
        """
        alike = self._are_alike(_BEGUN, hash(facts), sign)
        self._open = True
        if not alike:
            self._open = False
            (*smallest, _), (*largest, _) = self._consensus.smallest, self._consensus.largest
            if smallest == largest:
                if problem := difference():
                    raise MismatchError(problem)
                self._open = True
                return
            said = self._told(described())
            raise MismatchError(f"{self._name}: the ranks call it in different ways: {said}")

    def end(self, trail: Way) -> None:
        """End a call; ``MismatchError`` on all ranks if they went different ways, or passed other tensors."""
        if not self._open:
            return
        self._open = False
        if self._are_alike(_ENDED, trail.number, trail.number_of_plain):
            return
        if self._consensus.largest[0] == _RAISED:
            # Its notice is on the way.
            self._machine.segments.waiter.until(lambda: False, self._consensus.missing, 10 * _GRACE_SECONDS)
        if problem := self._parting(trail):
            raise MismatchError(problem)

    def failed(self, error: BaseException, trail: Way) -> None:
        """Say that the call raised: to ranks that do not raise alike this one has failed."""
        machine = self._machine
        begun, self._open = self._open, False
        if isinstance(error, PeerFailedError):
            machine.fail(error)
        if machine.closed or isinstance(error, _KNOWN) or not begun:
            return
        machine.labels.make_readable(error) if isinstance(error, Exception) else None
        if not isinstance(error, _AT_ONCE):
            try:
                if self._are_alike(_RAISED, trail.number, len(trail), _GRACE_SECONDS):
                    # As on one machine: who catches it can go on.
                    return
            except PeerFailedError:
                return
            except DistdlError:
                pass
        machine.fail(error)

    def abandon(self) -> None:
        """End a call that all ranks leave alike before its end."""
        self._open = False

    def _are_alike(self, phase: int, word: int, number: int, timeout: float | None = None) -> bool:
        return self._consensus.alike(self._title, phase, word, number, timeout=timeout)

    def backwards_differ(self) -> str:
        """How the ranks came to where their last backward began, if not alike; collective, blocking."""
        number = LOSS_ORIGIN.number(self._machine, self.ranks)
        if len({*self._all_of(number, "backwards").values()}) == 1:
            return ""
        mine = LOSS_ORIGIN.described(self._machine, self.ranks)
        ways = self._all_of(mine, "losses").values()
        at = next((at for at, calls in enumerate(zip_longest(*ways)) if len({*calls}) > 1), None)
        if at is None:
            told = "of other plain tensors, as labels, of what was computed of weights, or without a graph"
        else:
            told = self._told(f"calls {mine[at] if at < len(mine) else 'nothing more'}")
        return (
            f"{self._name}: the backward before this call began at what the ranks computed in different ways:"
            f" {told}. The gradients were of neither; do labels or factors of a loss depend on the rank?"
        )

    def _parting(self, trail: Way) -> str:
        # Where the ways of the ranks parted: all of them tell each other all calls.
        calls = trail.calls
        ways = self._all_of([call.word for call in calls], "ways").values()
        at = next((at for at, words in enumerate(zip_longest(*ways)) if len(set(words)) > 1), None)
        if at is None:
            return self._plain_apart(trail)
        mine = calls[at].described if at < len(calls) else "the end of the model"
        return (
            f"{self._name}: the ranks went different ways: after {at} equal calls "
            f"{self._told(f'calls {mine}')}: do modes, shapes or branches depend on the data of a rank?"
        )

    def _plain_apart(self, trail: Way) -> str:
        # The first plain tensor that differs by more than rounding, as what is computed of weights may.
        mine = [(*kind, crc32(data)) for *kind, data in trail.plain]
        given = [*zip_longest(*self._all_of(mine, "plain tensors").values())]
        at = [n for n, each in enumerate(given) if any(one != each[0] for one in each)]
        values = [values_of(*trail.plain[n][-2:]) for n in at if n < len(mine)]
        told = zip_longest(*self._all_of(values, "elements").values())
        for n, (first, *others) in zip(at, told, strict=True):
            (step, dtype, shape, form), *more = [one[:-1] for one in given[n] if one is not None]
            same = len(more) == len(others) and all(one == [step, dtype, shape, form] for one in more)
            if same and not any(are_apart(dtype, form, first, one) for one in others):
                continue
            return (
                f"{self._name}: {trail.calls[step - 1].described} is given a plain tensor of shape"
                f" {tuple(shape)} that is not alike on all ranks. A plain tensor is the whole one: draw"
                " random numbers on all ranks with one seed; a rank's own part of a tensor, as of to_local(),"
                " becomes a split tensor by SplitTensor.from_local"
            )
        return ""

    def _told(self, text: str) -> str:
        # What each rank says of itself, once for those that say the same.
        said: dict[str, list[int]] = {}
        for rank, each in self._all_of(text, "differences").items():
            said.setdefault(each, []).append(rank)
        return "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {each}"
            for each, ranks in said.items()
        )

    def _all_of(self, words: Any, what: str) -> dict[int, Any]:
        return gather_words(self._machine.segments, words, f"calls of {self._name} ({what})", self.ranks)


def modes() -> tuple[int, ...]:
    """Modes of torch that must be alike on all ranks."""
    autocast = torch.is_autocast_enabled("cpu")
    return (
        int(torch.is_grad_enabled()),
        int(torch.is_inference_mode_enabled()),
        crc32(str(torch.get_autocast_dtype("cpu")).encode()) if autocast else 0,
    )

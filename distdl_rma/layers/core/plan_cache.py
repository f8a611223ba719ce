"""What the ranks of a layer agree on, call by call, so that shapes may change without a deadlock."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.errors import DistdlError, ExchangeTimeout, PeerFailedError, ProtocolError, ShapeError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.layers.core.call_outcome import CallOutcome
from distdl_rma.layers.core.error_exchange import ErrorExchange
from distdl_rma.machine import Machine
from distdl_rma.ops.autograd import GradientNeeds
from distdl_rma.ops.tensors import DTYPES, MAX_DIMS, trouble_with
from distdl_rma.ops.weak_method import weakly_bound
from distdl_rma.segments.collectives.all_push import AllPush

_DTYPE_CODES = list(DTYPES)
_INPUT, _WEIGHTS = 1, 2
_NO_DTYPE = -1
_HEAD = 5
_WORDS = _HEAD + 2 * MAX_DIMS
_KEPT_PLANS = 16


@dataclass(frozen=True)
class InputFacts:
    """What one rank says of its input, of its weights and of what it wants, before data moves."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    needs: GradientNeeds
    weights: torch.dtype | None = None
    call_arguments: tuple[int, ...] = ()
    problem: str = ""

    @classmethod
    def about(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        call_arguments: tuple[int, ...] = (),
        idle: bool = False,
        problem: str = "",
    ) -> InputFacts:
        """Facts about a local tensor, the weight that the layer will use, and numbers it was called with.

        Of an idle rank, which has no part of the input, all tensors without elements are the same. What is
        no tensor that can move, and any other ``problem`` of the caller, is told instead.
        """
        problem = problem or trouble_with(x) or _trouble_with_numbers(call_arguments)
        if problem:
            return cls((), None, GradientNeeds(False, False), problem=problem)
        recording = torch.is_grad_enabled()
        needs = GradientNeeds(
            recording and x.requires_grad, recording and weight is not None and weight.requires_grad
        )
        dtype: torch.dtype = x.dtype
        shape = tuple(x.shape)
        if idle and 0 in shape:
            shape, dtype = (0,), _DTYPE_CODES[0]
        return cls(shape, dtype, needs, None if weight is None else weight.dtype, call_arguments)

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return self.shape, self.dtype, self.weights, self.call_arguments

    def encode(self) -> npt.NDArray[np.int64]:
        """Vector of numbers that travels; a problem becomes a tensor of no type."""
        words = np.zeros(_WORDS, np.int64)
        if self.dtype is None:
            words[1] = _NO_DTYPE
            return words
        code = _DTYPE_CODES.index(self.dtype)
        weights = _DTYPE_CODES.index(self.weights) if self.weights in DTYPES else _NO_DTYPE
        needs = _INPUT * self.needs.input + _WEIGHTS * self.needs.weights
        head = (len(self.shape), code, needs, weights, len(self.call_arguments))
        words[: len(head) + len(self.shape) + len(self.call_arguments)] = (
            *head,
            *self.shape,
            *self.call_arguments,
        )
        return words

    @classmethod
    def decode(cls, words: Sequence[int]) -> InputFacts:
        """Facts from the vector of numbers."""
        dims, code, needs, weights, count = words[:_HEAD]
        dtype = None if code == _NO_DTYPE else _DTYPE_CODES[code]
        kind = None if weights == _NO_DTYPE else _DTYPE_CODES[weights]
        wanted = GradientNeeds(bool(needs & _INPUT), bool(needs & _WEIGHTS))
        numbers = tuple(words[_HEAD : _HEAD + dims + count])
        return cls(numbers[:dims], dtype, wanted, kind, numbers[dims:])


def _trouble_with_numbers(call_arguments: tuple[int, ...]) -> str:
    # What does not fit into a row.
    if len(call_arguments) > MAX_DIMS:
        return f"the call has {len(call_arguments)} numbers, {MAX_DIMS} are the most"
    worst = max(call_arguments, key=abs, default=0)
    return "" if abs(worst) < 1 << 63 else f"the call has the number {worst}, which is out of range"


class Plan(Protocol):
    """What a layer derives from the facts of all its ranks."""

    def void(self) -> None:
        """Give up the exchange that some ranks may have started on this plan."""


P = TypeVar("P", bound=Plan)


def _nobody() -> CallOutcome | None:
    return None


class PlanCache(Generic[P]):
    """Plans of one layer, cached by what all its ranks say of their inputs.

    Every call, every rank tells the others its local shape in one small round, hidden behind the local
    compute: a rank whose own input looks as before goes ahead with the last plan and learns afterwards
    whether that was right. So a change that only some ranks see (a smaller last batch, another image
    size) reaches all of them in the same call.

    Parameters
    ----------
    machine
        The machine.
    ranks
        Rank ids that must agree.
    name
        Name of the layer.
    build
        Makes a plan from the facts of all ranks, by rank id; alike on all ranks, errors included. Called
        outside of inference mode: what a plan keeps is used in training too.
    arguments
        Asked in the first call for what the layer was built with; ranks that differ in it raise
        ``MismatchError`` when they meet there.
    outcome
        Asked in each call for how to tell ranks outside what becomes of it; None where nobody waits.

    Notes
    -----
    Of methods the plans hold no object, which must live as long as they are used: a layer that its own
    plans referred to would be freed late, and its memory too.
    """

    def __init__(
        self,
        machine: Machine,
        ranks: Sequence[int],
        name: str,
        build: Callable[[dict[int, InputFacts]], P],
        arguments: Callable[[], str] = str,
        outcome: Callable[[], CallOutcome | None] = _nobody,
    ) -> None:
        self._ranks, self._name = tuple(ranks), name
        self._build, self._arguments = weakly_bound(build), weakly_bound(arguments)
        self._trace, self._segments = machine.trace, machine.segments
        self._round: AllPush | None = None
        self._complaints = ErrorExchange(machine, self._ranks, name)
        # Asked for when a call begins: within an operation of autograd grad mode is off.
        self._ask_outcome, self._outcome = weakly_bound(outcome), _nobody()
        self._cache: OrderedDict[tuple[tuple[object, ...], ...], P] = OrderedDict()
        self._last: tuple[InputFacts, P] | None = None
        self._mine: InputFacts | None = None
        # What was said last, and what came of it: most calls repeat it.
        self._said: tuple[InputFacts, npt.NDArray[np.int64]] | None = None
        self._settled: tuple[bytes, tuple[P, GradientNeeds]] | None = None

    @property
    def last(self) -> P | None:
        """Plan of the last call, if there was one."""
        return self._last[1] if self._last else None

    def begin(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        call_arguments: tuple[int, ...] = (),
        idle: bool = False,
        problem: str = "",
    ) -> P | None:
        """Tell the other ranks about ``x``; return the last plan if it fits as far as this rank can see.

        Parameters
        ----------
        x
            What the layer was called with; if it is no tensor that can move, all ranks refuse it.
        weight
            The weight that the layer will use.
        call_arguments
            Numbers that it was called with.
        idle
            Whether this rank has no part of the input.
        problem
            What else is wrong with the call on this rank, for all ranks to refuse; empty if nothing is.
        """
        self._mine = mine = InputFacts.about(x, weight, call_arguments, idle, problem)
        self._outcome = self._ask_outcome()()
        if self._said is None or self._said[0] != mine:
            self._said = mine, mine.encode()
        if len(self._ranks) > 1:
            if self._round is None:
                with self._telling():
                    self._round = self._meet()
            self._round.start(self._said[1])
        return self.guess

    @property
    def guess(self) -> P | None:
        """The last plan, if it fits the call that has begun as far as this rank can see."""
        if self._last is None or self._mine is None:
            return None
        before, plan = self._last
        return plan if before.key == self._mine.key else None

    def _meet(self) -> AllPush:
        title = f"{self._name} (shapes, {fingerprint(self._arguments()()):014x})"
        met = AllPush(self._segments, self._ranks, _WORDS, np.int64, title)
        weakref.finalize(self, met.close)
        met.connect()
        return met

    def settle(self) -> tuple[P, GradientNeeds]:
        """Plan that holds for this call, and what any rank needs the gradient of.

        Blocking until every rank has begun. If it is not the plan that ``begin`` returned, nothing was
        moved: start again on this one. Facts that do not fit together raise the same error on every rank.
        """
        mine, said = self._mine, self._said
        if mine is None or said is None:
            raise ProtocolError(f"{self._name!r}: settle without begin")
        if self._round is None:
            rows = said[1][None]
        else:
            with self._trace.span("agree", self._name):
                rows = self._round.wait()
        words = rows.tobytes()
        if self._settled is None or self._settled[0] != words:
            with self._telling():
                self._settled = words, self._conclude(mine, rows.tolist())
        if self._outcome is not None:
            self._outcome.tell()
        return self._settled[1]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        # What the ranks of the layer refuse, all alike, is refused by those that wait for them too.
        try:
            yield
        except (ExchangeTimeout, PeerFailedError):
            raise
        except DistdlError as error:
            if self._outcome is not None:
                self._outcome.tell(error)
            raise

    def _conclude(self, mine: InputFacts, rows: list[list[int]]) -> tuple[P, GradientNeeds]:
        facts = {rank: InputFacts.decode(row) for rank, row in zip(self._ranks, rows, strict=True)}
        key = tuple(fact.key for fact in facts.values())
        last = self._last[1] if self._last else None
        plan = self._cache.get(key)
        if last is not None and plan is not last:
            last.void()
        if any(fact.dtype is None for fact in facts.values()):
            raise self._complaints.refuse(mine.problem, "")
        if plan is None:
            try:
                with torch.inference_mode(False):
                    plan = self._build()(facts)
            except DistdlError as error:
                raise type(error)(f"{self._name!r}: {error}") from None
            self._cache[key] = plan
        self._cache.move_to_end(key)
        self._last = (mine, plan)
        if len(self._cache) > _KEPT_PLANS:
            # Its memory goes with the last graph that still needs it.
            self._cache.popitem(last=False)
        return plan, GradientNeeds(
            *(any(both) for both in zip(*(f.needs for f in facts.values()), strict=True))
        )

    def agree(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        call_arguments: tuple[int, ...] = (),
        idle: bool = False,
        problem: str = "",
    ) -> tuple[P, GradientNeeds]:
        """Begin and settle at once, for layers that have nothing to compute in between."""
        self.begin(x, weight, call_arguments, idle, problem)
        return self.settle()


def common_dtype(facts: dict[int, InputFacts]) -> torch.dtype:
    """Type that all ranks pass.

    Raises
    ------
    ShapeError
        If two ranks differ; names both.
    """
    (first, expected), *others = ((rank, fact.dtype) for rank, fact in facts.items())
    for rank, dtype in others:
        if dtype != expected:
            raise ShapeError(f"rank {first} passes {expected} but rank {rank} {dtype}")
    if expected is None:
        raise ShapeError(f"rank {first} passes an unsupported dtype")
    return expected

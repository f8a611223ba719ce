"""What the ranks of a layer agree on, call by call, so that shapes may change without a deadlock."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distdl_rma.errors import DistdlError, ExchangeTimeout, PeerFailedError, ProtocolError, ShapeError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.layers.core.call_outcome import CallOutcome
from distdl_rma.layers.core.error_exchange import ErrorExchange, rows_of_all
from distdl_rma.layers.core.input_facts import InputFacts, words_for
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.segments.collectives.all_push import AllPush

_KEPT_PLANS = 16


class Plan(Protocol):
    """What a layer derives from the facts of all its ranks."""

    def void(self) -> None:
        """Give up the exchange that some ranks may have started on this plan."""


P = TypeVar("P", bound=Plan)
P_co = TypeVar("P_co", bound=Plan, covariant=True)


class Planner(Protocol[P_co]):
    """Who has plans: a layer, as the plans know it."""

    @property
    def site(self) -> CallSite:
        """Where the calls are."""

    def plan(self, facts: dict[int, InputFacts]) -> P_co:
        """Plan for the facts of all ranks, by rank id; alike on all of them, errors included.

        Made outside of inference mode: what a plan keeps is used in training too.
        """

    def built_with(self) -> str:
        """What is to be alike on all ranks; those that differ raise ``MismatchError`` in their first call."""
        return ""

    def outcome(self) -> CallOutcome | None:
        """How ranks outside are told what becomes of the call that begins; None where nobody waits."""
        return None


class PlanCache(Generic[P]):
    """Plans of one layer by what all its ranks say of their inputs: an agreement that costs a message a call.

    In every call each rank tells the others what it passes, in one small row, hidden behind the local
    compute: a rank whose own input looks as before starts on the last plan (``guess``) and learns afterwards
    whether that was right (``settle``). So a change that only some ranks see (a smaller last batch, another
    image size) reaches all of them in the same call. What does not fit is told in words, in a second round
    that takes place only then.

    ``ranks`` are the rank ids that must agree, ``inputs`` is the number of tensors that a call passes;
    ``tells`` says whether there may be ranks outside that wait for an outcome. Of their owner the plans hold
    no more than it holds of itself, and it must live as long as they are used: a layer that its own plans
    referred to would be freed late, and its memory too.
    """

    def __init__(self, owner: Planner[P], ranks: Sequence[int], inputs: int = 1, tells: bool = False) -> None:
        self._owner = weakref.ref(owner)
        (self._machine, self._name), self._ranks = owner.site, tuple(ranks)
        self._inputs, self._tells, self._alone = inputs, tells, len(self._ranks) == 1
        self._outcome: CallOutcome | None = None
        self._rows: AllPush | None = None
        self._errors = ErrorExchange(self._machine, self._ranks, self._name)
        self._plans: OrderedDict[tuple[object, ...], P] = OrderedDict()
        # Plan of the last call, and what fitted it of this rank's facts.
        self.last: P | None = None
        self._last_key: object = None
        self.guess: P | None = None
        # What this rank said last, and what came of the rows: most calls repeat it.
        self._said: tuple[InputFacts, npt.NDArray[np.int64]] | None = None
        self._settled: tuple[bytes, tuple[P, GradientNeeds]] | None = None

    def begin(
        self,
        xs: Sequence[torch.Tensor],
        weight: torch.Tensor | None = None,
        call_arguments: tuple[int, ...] = (),
        idle: Sequence[bool] = (False,),
        problem: str = "",
    ) -> None:
        """Tell the other ranks about ``xs``, and find the guess. Waits for them in the first call only.

        What are no tensors that can move, and any other ``problem`` with the call on this rank, all ranks
        refuse. ``weight`` is one that the layer will use, ``call_arguments`` are numbers that it was called
        with, ``idle`` says of which inputs this rank has no part.
        """
        mine = InputFacts.about(xs, weight, call_arguments, idle, problem)
        # Asked for now: within an operation of autograd grad mode is off.
        self._outcome = self._asked().outcome() if self._tells else None
        if self._said is None or self._said[0] != mine:
            self._said = mine, mine.encode(self._inputs)
        if not self._alone:
            if self._rows is None:
                with self._telling():
                    self._rows = self._meet()
            self._rows.start(self._said[1])
        self.guess = self.last if self._last_key == mine.key else None

    def _meet(self) -> AllPush:
        title = f"{self._name} (shapes, {fingerprint(self._asked().built_with()):014x})"
        count = words_for(self._inputs)
        rows = rows_of_all(self, self._machine, self._ranks, count, np.int64, title)
        rows.connect()
        return rows

    def settle(self) -> tuple[P, GradientNeeds]:
        """Plan that holds for this call, and what any rank needs the gradient of.

        Blocking until every rank has begun. If it is not the guess, nothing was moved: start again on this
        one. Facts that do not fit together raise the same error on every rank.
        """
        if self._said is None:
            raise ProtocolError(f"{self._name!r}: settle without begin")
        mine, row = self._said
        if self._rows is None:
            rows = row[None]
        else:
            with self._machine.trace.span("agree", self._name):
                rows = self._rows.wait()
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
        plan = self._plans.get(key)
        # Some rank may have started on its guess: that goes first, whatever comes now.
        if self.last is not None and plan is not self.last:
            self.last.void()
        if not all(fact.inputs for fact in facts.values()):
            raise self._errors.refuse(mine.problem, "")
        if plan is None:
            plan = self._plans[key] = self._made(facts)
        self._plans.move_to_end(key)
        self.last, self._last_key = plan, mine.key
        if len(self._plans) > _KEPT_PLANS:
            # Its memory goes with the last graph that still needs it.
            self._plans.popitem(last=False)
        return plan, GradientNeeds.of_any([fact.needs for fact in facts.values()])

    def _made(self, facts: dict[int, InputFacts]) -> P:
        try:
            for rank, fact in facts.items():
                if fact.given != self._inputs:
                    raise ShapeError(f"takes {self._inputs} inputs, got {fact.given} on rank {rank}")
            with torch.inference_mode(False):
                return self._asked().plan(facts)
        except DistdlError as error:
            raise type(error)(f"{self._name!r}: {error}") from None

    def _asked(self) -> Planner[P]:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"{self._name!r} is gone, and its plans are still used")
        return owner

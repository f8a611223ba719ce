"""Where the ranks of a layer agree on the shapes and types of a call, which may differ from call to call.

Each rank tells the others what it passes (``InputFacts``), and all plan for what all of them said. What they
refuse reads the same everywhere: on the ranks of the layer, and where its backward is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from distdl_rma.checks.consensus import Consensus, gather_words
from distdl_rma.checks.plan_cache import UNKNOWN, PlanCache, digest
from distdl_rma.errors import (
    DistdlError,
    ExchangeTimeout,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    ShapeError,
)
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.input_facts import InputFacts
from distdl_rma.layers.core.refusals import CallOutcome, refusal
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite

_KEY = "static shapes"
# What of a rank's calls that tell the others nothing must be alike on all ranks.
_MODES = ("records no gradients within static_shapes", "records gradients within static_shapes")


class Promise:
    """That no rank passes anything else to a layer than in its first call."""


def promise_on(machine: Machine, recording: bool = False) -> Promise | None:
    """What the ranks of a machine promise now; None if nothing.

    A call ``recording`` gradients, or not, asks: a wait in vain says if other ranks called otherwise.
    """
    found = machine.kept.get(_KEY)
    if not isinstance(found, Promise):
        return None
    machine.segments.watch.note(_MODES, recording)
    return found


@contextmanager
def static_shapes(place: Machine | Partition) -> Iterator[None]:
    """Context in which every rank passes to a layer what it passed in the layer's first call within.

    The same local shapes and types, the same that needs a gradient; calls with and without recording of
    gradients are told apart. Layers that take plain shards then agree in their first call only, and no rank
    waits for those that it needs no data of. A distributed model needs none of this: split tensors know their
    shapes. Collective over the machine to enter, blocking; local to leave.

    What changes all the same is a ``ShapeError`` on the rank that sees it; the others, which would wait for
    this one, raise ``PeerFailedError``, and the machine is over. Gradients are recorded on all ranks or on
    none: where they are not, a rank waits in vain, and ``ExchangeTimeout`` says so.

    Raises
    ------
    ProtocolError
        If shapes are promised already.
    """
    machine = Machine.of(place)
    if promise_on(machine) is not None:
        raise ProtocolError("static_shapes: this machine's shapes are promised already")
    gather_words(machine.segments, "", "static_shapes")
    machine.kept[_KEY] = Promise()
    try:
        yield
    finally:
        machine.kept.pop(_KEY, None)
        machine.segments.watch.note()


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


class ShapeAgreement(Generic[P]):
    """What the ranks of one layer pass, agreed upon in each call, and the plans that follow from it.

    What all ranks said in a call has a number, the same on all of them. In every call each rank says which
    number its own input fits, in a vote that is hidden behind the local compute: a rank whose input looks as
    before starts on the last plan (``guess``) and learns afterwards whether that was right (``settle``). So a
    change that only some ranks see (a smaller last batch, another image size) reaches all of them in the same
    call; only then they tell each other what they pass. What does not fit is told in words, in a round more.

    ``ranks`` are the rank ids that must agree, ``inputs`` is the number of tensors that a call passes;
    ``tells`` says whether there may be ranks outside that wait for an outcome. The owner is held weakly, and
    must live as long as this is used: a layer that its own agreement referred to would be freed late, and
    its memory too.
    """

    def __init__(self, owner: Planner[P], ranks: Sequence[int], inputs: int = 1, tells: bool = False) -> None:
        self._owner = weakref.ref(owner)
        (self._machine, self._name), self._ranks = owner.site, tuple(ranks)
        self._inputs, self._tells = inputs, tells
        self._outcome: CallOutcome | None = None
        self._consensus: Consensus | None = None
        # What this rank says of the layer, once it has met the others.
        self._title, self._epoch = "", 0
        self._memory: PlanCache[P, GradientNeeds] = PlanCache()
        # Plan of the last call, and what fitted it of this rank's facts.
        self.last: P | None = None
        self._last_key: object = None
        self.guess: P | None = None
        # What this rank said last, as a row, and what a plan depends on: most calls repeat it.
        self._said: tuple[InputFacts, bytes, object] | None = None
        self._proposal = UNKNOWN
        # What all ranks promised to go on with: what this one passes, with gradients recorded and without.
        self._promise: Promise | None = None
        self._kept: dict[bool, tuple[InputFacts, bytes, int]] = {}
        self._recording = self._silent = self._astray = False

    def begin(self, mine: InputFacts) -> None:
        """Tell the other ranks about a call, and find the guess. Waits for them in the first call only."""
        if self._astray:
            said = f"{self._name!r}: rank {self._machine.rank} called it while others were elsewhere"
            error = ProtocolError(f"{said}, and what it sent then would be taken for part of this one")
            # They may take it before they wait for this rank.
            self._machine.fail(error)
            raise error
        # Asked for now: within an operation of autograd grad mode is off.
        self._outcome = self._asked().outcome() if self._tells else None
        if self._said is None or self._said[0] != mine:
            self._said = mine, mine.encode(), mine.key
        _, row, key = self._said
        if self._is_promised(mine, row):
            return
        words = proposal, *_ = self._memory.compared(row)
        self._proposal = proposal
        if len(self._ranks) > 1:
            if self._consensus is None:
                self._consensus = self._meet()
            self._epoch = self._consensus.start(self._title, *words)
        self.guess = self.last if self._last_key == key else None
        if proposal and self._memory[proposal].plan is not self.last:
            # Where all ranks propose it, none has started on the last one.
            self.guess = None

    def _is_promised(self, mine: InputFacts, row: bytes) -> bool:
        # Whether all ranks promised to pass what they passed before, and this one does.
        self._recording = torch.is_grad_enabled()
        promise = promise_on(self._machine, self._recording)
        if promise is not self._promise:
            self._promise, self._kept = promise, {}
        kept = self._kept.get(self._recording)
        self._silent = kept is not None
        if kept is None:
            return False
        facts, before, self._proposal = kept
        if row != before:
            error = ShapeError(
                f"{self._name!r}: rank {self._machine.rank} passes {mine.described} and passed"
                f" {facts.described} before, within static_shapes"
            )
            # The others were told nothing, and would wait for this one.
            self._machine.fail(error)
            raise error
        self.guess = self._memory[self._proposal].plan
        return True

    def _meet(self) -> Consensus:
        self._title = f"{self._name} (shapes, {fingerprint(self._asked().built_with()):014x})"
        with self._telling():
            consensus = Consensus.of(self._machine.segments, self._ranks)
            consensus.connect()
        return consensus

    def settle(self) -> tuple[P, GradientNeeds]:
        """Plan that holds for this call, and what any rank needs the gradient of.

        Blocking until every rank has begun. If it is not the guess, nothing was moved: start again on this
        one. Facts that do not fit together raise the same error on every rank.
        """
        if self._said is None:
            raise ProtocolError(f"{self._name!r}: settle without begin")
        (mine, row, key), memory = self._said, self._memory
        alike = self._silent or self._all_say_the_same()
        number = self._proposal if alike else UNKNOWN
        if not number:
            with self._telling():
                number = self._heard(row, alike)
        state = memory[number]
        if number != memory.number:
            memory.come_to(number, row)
            self.last, self._last_key = state.plan, key
        if self._promise is not None:
            self._kept[self._recording] = mine, row, number
        if self._outcome is not None:
            self._outcome.tell()
        return state.plan, state.needs

    def _all_say_the_same(self) -> bool:
        if self._consensus is None:
            return True
        trace = self._machine.trace
        try:
            if trace.recording is None:
                return self._consensus.wait(epoch=self._epoch)
            with trace.span("agree", self._name):
                return self._consensus.wait(epoch=self._epoch)
        except MismatchError as error:
            # Weights and a halo may be on their way already, to ranks that do not expect them.
            self._astray = True
            if self._outcome is not None:
                self._outcome.tell(error)
            raise

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

    def _heard(self, row: bytes, alike: bool) -> int:
        # The number of what all ranks say now, which they tell each other unless it is the same.
        rows = [row] * len(self._ranks)
        if self._consensus is not None and not alike:
            rows = self._consensus.rows(row, self._consensus.largest[-1])
        # Most ranks say what others say too.
        decoded = {each: InputFacts.decode(each) for each in set(rows)}
        facts = {rank: decoded[each] for rank, each in zip(self._ranks, rows, strict=True)}
        key = digest(repr([fact.key for fact in facts.values()]).encode())
        plan = self._memory.plan(key)
        # Some rank may have started on its guess: that goes first, whatever comes now.
        if self.last is not None and plan is not self.last:
            self.last.void()
        if any(fact.problem for fact in decoded.values()):
            raise refusal(self._name, {rank: fact.problem for rank, fact in facts.items()})
        needs = GradientNeeds.of_any([fact.needs for fact in decoded.values()])
        plan = self._made(facts) if plan is None else plan
        longest = max(map(len, decoded))
        return self._memory.number_of(plan, needs, key, digest(b"".join(rows)), longest)

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

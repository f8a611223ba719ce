"""Agreement of a layer's ranks on the shapes and types of a call, which may differ from call to call.

Each rank sends facts about its inputs (``InputFacts``), and all ranks derive the same plan from the facts of
all. Errors are equal on all ranks of the layer, and on ranks outside that wait for its backward.

A plain shard says nothing about those of other ranks. Without an agreement, a rank whose last batch is
smaller would send fewer bytes than its neighbour waits for: a hang, or old data in silence. So no call goes
without one, and most calls hide it behind their computation::

    rank 0    begin: send id 3    start on plan 3 .... compute ....    settle: all sent 3    finish
    rank 1    begin: send id 3    start on plan 3 .... compute ....    settle: all sent 3    finish

If one rank's facts are new, it sends id 0, the ids differ on all ranks, and all exchange their facts::

    rank 0    begin: send id 3    start on plan 3 ....    settle: ids differ, rows, void 3    start on plan 4
    rank 1    begin: send id 0    no guess ...........    settle: ids differ, rows, void 3    start on plan 4

Ids stand for facts because all ranks number new combinations of facts in the same order (``PlanCache``). A
hash of the facts in place of an id would do for equal shards, but says nothing of the facts of others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from distdl_rma.errors import DistdlError, ExchangeTimeout, MismatchError, PeerFailedError, ProtocolError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.operation import Operation
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, check_devices, check_trainable
from distdl_rma.layers.partitioned.core.refusals import CallOutcome, attributed, refusal
from distdl_rma.segments.consensus import Consensus
from distdl_rma.segments.plan_cache import UNKNOWN, PlanCache, digest

if TYPE_CHECKING:
    from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer

P = TypeVar("P", bound=Operation)


class ShapeAgreement(Generic[P]):
    """Agreement of one layer's ranks on the facts of each call, and the plans that follow from them.

    Each distinct combination of all ranks' facts has an id, equal on all ranks. In every call each rank sends
    the id of the combination that it expects. The comparison overlaps with the local computation: a rank
    whose facts are those of the last call starts on the last plan (``guess``) and receives the result
    afterwards (``settle``). So a change that only some ranks see (a smaller last batch, another image size)
    reaches all of them in the same call. Only then they exchange their facts.

    ``ranks`` are the rank ids that must agree, and ``has_outcome`` is whether ranks outside may wait for the
    outcome of a call. The owner must live as long as this is used. It is referred to weakly: a reference
    cycle would free the layer and its memory late.

    Always true between two calls: ``last`` is the plan of the last call, equal on all ranks, and
    ``_last_key`` the key of this rank's facts in it. Within a call, ``begin`` comes before ``settle``, each
    once on every rank. An error that one rank alone knows of travels as the ``problem`` of its facts, so that
    this rank takes part in the agreement too; what it cannot send, it reports by failing the machine.
    """

    def __init__(self, owner: OperatorLayer[P], ranks: Sequence[int], has_outcome: bool = False) -> None:
        self._owner: Any = weakref.proxy(owner)
        (self._machine, self._name), self._ranks = owner.site, tuple(ranks)
        self._has_outcome = has_outcome
        self._outcome: CallOutcome | None = None
        self._consensus: Consensus | None = None
        # Title of the layer's comparisons, with a fingerprint of its arguments, from the first call on.
        self._title, self._epoch = "", 0
        self._cache: PlanCache[P, GradientNeeds] = PlanCache()
        # Plan of the last call, and the key of this rank's facts in it.
        self.last: P | None = None
        self._last_key: object = None
        self.guess: P | None = None
        # This rank's last facts, their row and their key: most calls repeat them.
        self._mine: tuple[InputFacts, bytes, object] | None = None
        self._proposal, self._mismatched = UNKNOWN, False

    def begin(self, mine: InputFacts) -> None:
        """Send this rank's id to the other ranks, and choose the guess; blocking in the first call only."""
        if self._mismatched:
            wrong = f"{self._name!r}: rank {self._machine.rank} called it while others were elsewhere"
            error = ProtocolError(f"{wrong}, and what it sent then would be taken for part of this one")
            # The other ranks may use that data before they wait for this rank.
            self._machine.fail(error)
            raise error
        # The outcome depends on grad mode, which is off later, within an operation of autograd: a convolution
        # settles in the forward of its autograd function.
        self._outcome = self._owner.outcome() if self._has_outcome else None
        if self._mine is None or self._mine[0] != mine:
            self._mine = mine, mine.encode(), mine.key
        _, row, key = self._mine
        words = proposal, *_ = self._cache.compared(row)
        self._proposal = proposal
        if len(self._ranks) > 1:
            if self._consensus is None:
                self._consensus = self._connect()
            self._epoch = self._consensus.start(self._title, *words)
        self.guess = self.last if self._last_key == key else None
        if proposal and self._cache[proposal].plan is not self.last:
            # If all ranks propose this other plan, none of them has started on the last one. A
            # guess is always the last plan: all ranks void that one if they agree on another.
            self.guess = None

    def _connect(self) -> Consensus:
        # At the first call rather than at construction: a layer that is built but never called, such as one
        # of a model of which a job uses half, takes no memory and waits for no rank. The title has the
        # arguments, so that ranks that built the layer otherwise are told in this call.
        self._title = f"{self._name} (shapes, {fingerprint(self._owner.arguments_text()):014x})"
        with self._sending_errors():
            consensus = Consensus.of(self._machine.segments, self._ranks)
            consensus.connect(name=self._name)
        return consensus

    def settle(self) -> tuple[P, GradientNeeds]:
        """Plan for this call, and the gradients that any rank needs.

        Blocking until every rank has begun. If the plan is not the guess, an exchange on the guess is void:
        start again on this plan. Facts that do not fit together raise the same error on every rank.
        """
        if self._mine is None:
            raise ProtocolError(f"{self._name!r}: settle without begin")
        (_, row, key), cache = self._mine, self._cache
        alike = self._ids_agree()
        number = self._proposal if alike else UNKNOWN
        if not number:
            with self._sending_errors():
                number = self._exchange_facts(row, alike)
        state = cache[number]
        if number != cache.number:
            cache.switch_to(number, row)
            self.last, self._last_key = state.plan, key
        if self._outcome is not None:
            self._outcome.send()
        return state.plan, state.needs

    def _ids_agree(self) -> bool:
        if self._consensus is None:
            return True
        trace = self._machine.trace
        try:
            if trace.recording is None:
                return self._consensus.wait(epoch=self._epoch)
            with trace.span("agree", self._name):
                return self._consensus.wait(epoch=self._epoch)
        except MismatchError as error:
            # This rank may have sent weights and a halo already, to ranks that do not expect them.
            self._mismatched = True
            if self._outcome is not None:
                self._outcome.send(error)
            raise

    @contextmanager
    def _sending_errors(self) -> Iterator[None]:
        # Errors that all ranks of the layer raise also reach the ranks outside that wait for them.
        try:
            yield
        except (ExchangeTimeout, PeerFailedError):
            raise
        except DistdlError as error:
            if self._outcome is not None:
                self._outcome.send(error)
            raise

    def _exchange_facts(self, row: bytes, alike: bool) -> int:
        # Id of the combination of all ranks' facts; the ranks exchange rows unless all rows are equal. A
        # combination that was evicted, or comes in another order, finds its plan by the key of the facts.
        rows = [row] * len(self._ranks)
        if self._consensus is not None and not alike:
            rows = self._consensus.rows(row, self._consensus.largest[-1])
        decoded = {each: InputFacts.decode(each) for each in set(rows)}
        facts = {rank: decoded[each] for rank, each in zip(self._ranks, rows, strict=True)}
        key = digest(repr([fact.key for fact in facts.values()]).encode())
        plan = self._cache.plan(key)
        try:
            self._check(facts)
        except DistdlError:
            plan = None
            raise
        finally:
            # Some rank may have started on its guess: void that exchange before any error is raised.
            # Otherwise its halo, which has arrived, would be taken for that of the next call.
            if self.last is not None and plan is not self.last:
                self.last.void()
        if plan is None:
            # All ranks have the same facts here, so they all make the plan or all raise, without a message.
            with attributed(f"{self._name!r}", DistdlError), torch.inference_mode(False):
                plan = self._owner.plan(facts)
        needs = GradientNeeds.of_any([fact.needs for fact in decoded.values()])
        longest = max(map(len, decoded))
        return self._cache.add(plan, needs, key, digest(b"".join(rows)), longest)

    def _check(self, facts: dict[int, InputFacts]) -> None:
        if any(fact.problem for fact in facts.values()):
            raise refusal(self._name, {rank: fact.problem for rank, fact in facts.items()})
        with attributed(f"{self._name!r}", DistdlError):
            check_devices(facts)
            check_trainable(facts)

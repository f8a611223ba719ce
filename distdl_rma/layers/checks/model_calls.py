"""Comparison of the ranks' calls of a model: how they begin, which functions they call, and how they end.

    every rank                             what the ranks compare            messages
    begin(facts, ...)                      one hash of modes, shapes,        one small equality check
                                           replicas, samples of inputs
      forward: each function of split      nothing; each rank notes it       none
      tensors is a step of the trace
    end(trace)                             one hash of all steps and their   one small equality check
                                           arguments, and of plain tensors

Only if a hash differs do ranks exchange words, to name the first difference. Equal calls have equal hashes,
so that no right program is refused; different calls have equal ones by accident only.

Invariants:

- No rank begins a call before all others begin the same one, nor leaves it before all others have ended it.
  So a message of one call is never received in another, and an error names this call.
- A difference raises ``MismatchError`` with one text on all ranks.
- A rank that raises in its forward tells the others at the end (``failed``). If all ranks raised at the same
  place, the program may catch the error and go on; else the machine has failed, as ranks are at different
  places of the program.
- Hashes are of numbers and of checksums of texts: Python's hash of a text differs between processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch

from distdl_rma.errors import (
    ClosedError,
    DistdlError,
    ExchangeTimeout,
    MismatchError,
    PeerFailedError,
    SegmentError,
)
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import by_key
from distdl_rma.layers.checks.arguments import (
    checksum,
    described_arguments,
    differ_beyond_rounding,
    sample_of,
    summary_of,
    values_of,
)
from distdl_rma.layers.dtypes import as_words, is_readable
from distdl_rma.layers.staging import down, explain_memory
from distdl_rma.segments.consensus import Consensus, gather_words
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.waiting.error_texts import LOST, append_state

_BEGUN, _ENDED, _RAISED = range(3)
# A rank that raises waits this long for the others to raise too, before it notifies them of its failure.
_GRACE_SECONDS = 1.0
# Errors that are not compared: the machine has failed or is closed.
_KNOWN = PeerFailedError, ClosedError
# Errors after which the machine fails without a comparison.
_AT_ONCE = ExchangeTimeout, SegmentError
# Functions that use only the shape or type of a plain tensor, and those that overwrite their first argument.
_UNREAD = frozenset({"view_as", "expand_as", "reshape_as", "type_as", "to", "resize_as_"})
_OVERWRITE = frozenset({"__setitem__", "copy_", "index_copy_", "scatter_", "index_put_", "masked_scatter_"})
_OVERWRITE |= {"index_fill_", "masked_fill_"}


_WHOLE = (
    "All ranks must pass the same whole tensor: load the same data, without a DistributedSampler, or call"
    " torch.manual_seed with the same number before it is drawn. To give each rank its own part of a tensor,"
    " make a split tensor by distdl_rma.shard"
)


class Check(Protocol):
    """State of a rank that must be equal on all ranks when a call begins, and how ranks compare it."""

    # Name of the state, for messages.
    what: str

    def number(self) -> int:
        """Hash of the state, equal on ranks with equal states; local."""
        ...

    def words(self) -> Any:
        """The state, or a summary, in JSON's types; needed only if hashes differ; local."""
        ...

    def problem(self, words: Mapping[int, Any]) -> str:
        """Error text from the words of all ranks, equal on all ranks; empty if there is no error."""
        ...


class Calls:
    """Comparison of ranks at the beginning and at the end of each call of a model; blocking, small.

    At the beginning ranks compare one hash of all ``checks``, and exchange their words only if it differs. At
    the end all ranks know whether they called the same functions, and whether a rank raised. One of ``end``,
    ``failed`` and ``abandon`` follows each ``begin`` that returned; in between ``_open`` is true.
    """

    def __init__(
        self, machine: Machine, ranks: Sequence[int], name: str, checks: Sequence[Check] = ()
    ) -> None:
        self._machine, self.ranks, self._name = machine, tuple(ranks), name
        self._consensus, self._title = Consensus.of(machine.segments, self.ranks), f"calls of {name}"
        self._open, self._checks = False, checks
        # Number of calls, which selects the elements to compare; kinds of inputs that were compared whole;
        # kinds of plain tensors that functions have received.
        self._number, self._seen = 0, set[object]()
        self._met = set[Any]()

    def begin(
        self,
        facts: tuple[int, ...],
        described: Callable[[], str],
        trace: CallTrace,
        inputs: Sequence[torch.Tensor] = (),
        checked: bool = True,
    ) -> None:
        """Begin a call; ``MismatchError`` on all ranks if their facts differ, which ``described`` describes.

        Plain inputs of a new kind are compared whole: a rank may pass its block instead of the whole tensor.
        If ``checked``, this error is also raised if a check finds a problem or samples of inputs differ, and
        ``trace`` notes the plain tensors that functions receive.
        """
        sign = 0
        if checked:
            self._number = at = self._number + 1
            trace.at, trace.met = at, self._met
            try:
                numbers = [check.number() for check in self._checks]
                if inputs:
                    numbers += [crc32(sample_of(x, at)) for x in inputs]
            except Exception as error:
                # Of this rank alone, as for want of memory on its device: the others wait already.
                explain_memory(error, self._name, inputs)
                self._machine.fail(error)
                raise
            sign = hash(tuple(numbers))
        try:
            self._open = self._consensus.alike(self._title, _BEGUN, hash(facts), sign)
        except _AT_ONCE as error:
            self._machine.fail(error)
            raise
        if not self._open:
            self._explain(described)
        if inputs:
            kind = tuple([(x.shape, x.dtype) for x in inputs])
            if not self._open or kind not in self._seen:
                what = "an input of a distributed model"
                equal_on_all_ranks(self._machine, self.ranks, inputs, what)
                self._seen.add(kind)
        self._open = True

    def _explain(self, described: Callable[[], str]) -> None:
        # Raises for the difference that hashes have shown; not for inputs, or what a check finds harmless.
        (_, *smallest, _), (_, *largest, _) = self._consensus.smallest, self._consensus.largest
        if smallest != largest:
            texts = self._gather(described(), "differences")
            raise MismatchError(f"{self._name}: the ranks call it in different ways: {by_ranks(texts)}")
        for check in self._checks:
            if problem := check.problem(self._gather(check.words(), check.what)):
                raise MismatchError(f"{self._name}: {problem}")

    def end(self, trace: CallTrace) -> None:
        """End a call; ``MismatchError`` on all ranks if their functions or plain arguments differ."""
        if not self._open:
            return
        self._open = False
        try:
            plain = checksum(trace.plain) if trace.plain else 0
            if self._consensus.alike(self._title, _ENDED, trace.number, plain):
                return
        except _AT_ONCE as error:
            # Others may wait within the model, in a function that this rank has not called.
            self._machine.labels.make_readable(error)
            self._machine.fail(error)
            raise
        if self._consensus.largest[1] == _RAISED:
            # Wait for the failure notice of the rank that raised.
            self._machine.segments.waiter.until(lambda: False, self._consensus.missing, 10 * _GRACE_SECONDS)
        if problem := self._function_difference(trace) or self._plain_difference(trace):
            raise MismatchError(f"{self._name}: {problem}")

    def failed(self, error: BaseException, trace: CallTrace) -> None:
        """End a call that raised; the machine stays usable only if all ranks raised at the same place."""
        machine = self._machine
        begun, self._open = self._open, False
        if isinstance(error, PeerFailedError):
            machine.fail(error)
        if machine.closed or isinstance(error, _KNOWN) or not begun:
            return
        machine.labels.make_readable(error) if isinstance(error, Exception) else None
        explain_memory(error, self._name)
        if not isinstance(error, _AT_ONCE):
            words = _RAISED, trace.number, len(trace.steps)
            try:
                if self._consensus.alike(self._title, *words, timeout=_GRACE_SECONDS):
                    # A program that catches the error can go on.
                    return
            except PeerFailedError:
                # Another rank has notified all ranks first.
                append_state(error, LOST)
                return
            except DistdlError:
                pass
        machine.fail(error)

    def abandon(self) -> None:
        """End a call that all ranks leave early, at the same place."""
        self._open = False

    def _function_difference(self, trace: CallTrace) -> str:
        # The first call that differs between ranks; all of them exchange the words of all their calls.
        calls = trace.calls
        ways = self._gather([call.word for call in calls], "ways").values()
        at = first_difference(ways)
        if at is None:
            return ""
        mine = calls[at].described if at < len(calls) else "the end of the model"
        texts = self._gather(f"calls {mine}", "differences")
        return (
            f"the ranks went different ways: after {at} equal calls {by_ranks(texts)}:"
            " do modes, shapes or branches depend on the data of a rank?"
        )

    def _plain_difference(self, trace: CallTrace) -> str:
        # The first plain tensor that differs by more than rounding, by which results of weights may differ.
        mine = [(*kind, crc32(data)) for *kind, data in trace.plain]
        given = [*zip_longest(*self._gather(mine, "plain tensors").values())]
        at = [n for n, each in enumerate(given) if any(one != each[0] for one in each)]
        values = [values_of(*trace.plain[n][-2:]) for n in at if n < len(mine)]
        gathered = zip_longest(*self._gather(values, "elements").values())
        for n, (first, *others) in zip(at, gathered, strict=True):
            (step, dtype, shape, form), *more = [one[:-1] for one in given[n] if one is not None]
            same = len(more) == len(others) and all(one == [step, dtype, shape, form] for one in more)
            if same and not any(differ_beyond_rounding(dtype, form, first, one) for one in others):
                continue
            return (
                f"{trace.calls[step - 1].described} is given a plain tensor of shape"
                f" {tuple(shape)} that is not alike on all ranks. {_WHOLE}"
            )
        return ""

    def _gather(self, words: Any, what: str) -> dict[int, Any]:
        return gather_words(self._machine.segments, words, f"calls of {self._name} ({what})", self.ranks)


def first_difference(lists: Any) -> int | None:
    """Index of the first difference between the lists of all ranks; None if there is none."""
    return next((at for at, each in enumerate(zip_longest(*lists)) if len({*each}) > 1), None)


def by_ranks(texts: Mapping[int, str]) -> str:
    """The ranks' texts in one line; ranks with equal texts share an entry."""
    return "; ".join(
        f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}: {text}"
        for text, those in by_key(texts, texts.__getitem__).items()
    )


def equal_on_all_ranks(
    machine: Machine, ranks: Sequence[int], tensors: Sequence[torch.Tensor], what: str
) -> None:
    """Raise ``MismatchError`` if plain tensors differ between ``ranks``; blocking, collective over these."""
    mine = [fingerprint(tuple(x.shape), x.dtype, as_words(down(x).contiguous()).tobytes()) for x in tensors]
    for rank, theirs in gather_words(machine.segments, mine, what, ranks).items():
        if theirs != mine:
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise MismatchError(
                f"{what} differs between rank {machine.rank}, which passes {shapes}, and rank {rank}."
                f" {_WHOLE}"
            )


class CalledFunction(NamedTuple):
    """A step of a trace, which has ``word`` and ``described``, and its arguments without tensors."""

    step: Any
    arguments: list[Any]

    @property
    def word(self) -> int:
        """Checksum of the step and its arguments."""
        return checksum(self.arguments, self.step.word)

    @property
    def described(self) -> str:
        """Text for messages."""
        return f"{self.step.described}{described_arguments(self.arguments)}"


class CallTrace:
    """The functions that a rank calls in a call of a model, and their arguments.

    Only added to, by ``site.note`` for functions and by the model for what it leaves. Plain tensors among the
    arguments are compared as well: a rank may have its own part of one that all must have whole. They are
    many and large, so each is read whole when it is new, and by 256 elements afterwards, others in each call.
    """

    def __init__(self) -> None:
        # Each has ``word``, a number that is equal for equal steps, and ``described``, for messages.
        self.steps: list[Any] = []
        # By turns the number of a step that has arguments, and these arguments as words.
        self.arguments: list[Any] = []
        # Plain tensors: number of the step, type, shape, form and bytes. The bytes summarise all elements in
        # the first call with such a tensor, and are a sample in later calls, of other elements in each.
        self.plain: list[tuple[int, str, tuple[int, ...], str, bytes]] = []
        # Number of the call; kinds of plain tensors in earlier calls, None while none is to be noted.
        self.at = 0
        self.met: set[Any] | None = None
        self.graph, self.thread = torch.is_grad_enabled(), threading.get_ident()

    @property
    def number(self) -> int:
        """Hash of steps and arguments, equal on ranks that called the same functions."""
        return hash((checksum(self.arguments), *[step.word for step in self.steps]))

    def note_plain(self, function: Any, args: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        """Note a summary or sample of the plain tensors that the last step received."""
        name = getattr(function, "__name__", "")
        if self.met is None or name in _UNREAD:
            return
        for at, x in enumerate(given):
            if not is_readable(x) or (args and x is args[0] and name in _OVERWRITE):
                continue
            dtype, shape = str(x.dtype), tuple(x.shape)
            kind = self.steps[-1].word, at, dtype, shape
            found = (dtype, sample_of(x, self.at)) if kind in self.met else summary_of(x)
            self.met.add(kind)
            self.plain += ((len(self.steps), dtype, shape, *found),)

    @property
    def calls(self) -> list[CalledFunction]:
        """Each step with its arguments."""
        arguments = dict(zip(self.arguments[::2], self.arguments[1::2], strict=True))
        return [CalledFunction(step, arguments.get(at, [])) for at, step in enumerate(self.steps, 1)]

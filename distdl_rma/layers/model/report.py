"""Reports of a step of a distributed model: its functions, the data that they move, and waiting times.

An observer stands in the place of each rule's handler and reads counters before and after it: what this rank
sent, and copied from and to its device, in the forward of that function. Times come from a recording of the
machine, whose events have the names of sites: these also cover the backward, which no observer sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from distdl_rma.errors import ConfigurationError
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.site import Site, site_of
from distdl_rma.layers.split.calls.table import OBSERVERS, Rule, name_of
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.layers.staging import COPIES
from distdl_rma.trace import in_columns, size_text

# Number of rows that ``print`` shows.
_WORST = 5
# What is counted of a call and of the step, on this rank.
_COUNTED = "nbytes", "messages", "nbytes_down", "nbytes_up", "copied"


@dataclass(frozen=True)
class Call:
    """A function at one place of a program, in one step, on one rank.

    ``inputs`` and ``output`` are global shapes with layouts. ``nbytes`` and ``messages`` count what this rank
    sent in the forward. ``waited`` are seconds in forward and backward, ``hidden`` are seconds in which data
    travelled while this rank computed. ``moved`` names the operands that the function's rule redistributed.

    ``nbytes_down`` and ``nbytes_up`` were copied between device and host in the forward, ``copied`` are the
    seconds that this rank spent in these copies; all 0 on the CPU.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    >>> with report(model) as step:
    ...     y = model(torch.rand(1, 1, 8, 8))
    >>> step.calls[0].function, step.calls[0].messages
    ('conv2d', 1)
    """

    module: str
    function: str
    where: str
    kind: str
    inputs: tuple[str, ...]
    output: str
    times: int = 0
    nbytes: int = 0
    messages: int = 0
    waited: float = 0.0
    hidden: float = 0.0
    moved: tuple[str, ...] = ()
    nbytes_down: int = 0
    nbytes_up: int = 0
    copied: float = 0.0


@dataclass
class StepReport:
    """The calls of a step on this rank, in the order of their first times.

    ``print`` shows the whole step and the calls that waited longest, ``table`` has all calls.

    ``nbytes`` and ``messages`` are those of the whole step, with backward and sums of gradients. So are
    ``nbytes_down`` and ``nbytes_up``, copied from a device to the host and back, and ``copied``, the seconds
    of starting these copies and waiting for them.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    >>> with report(model) as step:
    ...     model(torch.rand(1, 1, 8, 8)).mean().backward()
    >>> len(step.calls), step.moved, step.nbytes > 0
    (2, [], True)
    """

    calls: list[Call] = field(default_factory=list)
    nbytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    nbytes_down: int = 0
    nbytes_up: int = 0
    copied: float = 0.0

    @property
    def moved(self) -> list[Call]:
        """Calls whose operands a rule redistributed; ``fallback="error"`` would refuse these."""
        return [call for call in self.calls if call.moved]

    def __str__(self) -> str:
        total = (
            f"the step: {size_text(self.nbytes)} in {self.messages} messages with backward and gradients,"
            f" {1e3 * self.waited:.1f} of {1e3 * self.seconds:.1f} ms waited; a rule moved operands of"
            f" {len(self.moved)} calls"
        )
        if self.nbytes_down or self.nbytes_up:
            total += (
                f"\nbetween device and host: {size_text(self.nbytes_down)} down, {size_text(self.nbytes_up)}"
                f" up, {1e3 * self.copied:.1f} ms in these copies"
            )
        worst = sorted(self.calls, key=lambda call: (not call.moved, -call.waited))[:_WORST]
        return f"{total}\n{self._rows(worst)}\n(the worst rows; table() has all {len(self.calls)})"

    def table(self) -> str:
        """A row for each call, in the order of their first times."""
        return self._rows(self.calls)

    def _rows(self, calls: list[Call]) -> str:
        heads = ["module", "function", "at", "output", "sent", "messages", "waited", "moved by rule"]
        on_device = any(call.nbytes_down or call.nbytes_up for call in calls)
        heads += ["down", "up", "copied"] if on_device else []
        rows = [
            (
                call.module or "-",
                call.function + (f" x{call.times}" if call.times > 1 else ""),
                call.where,
                call.output,
                size_text(call.nbytes),
                str(call.messages),
                f"{1e3 * call.waited:.2f} ms",
                ", ".join(call.moved) or "-",
                size_text(call.nbytes_down),
                size_text(call.nbytes_up),
                f"{1e3 * call.copied:.2f} ms",
            )[: len(heads)]
            for call in calls
        ]
        return "\n".join(in_columns((heads, *rows)))


@contextmanager
def report(model: nn.Module) -> Iterator[StepReport]:
    """Context of one step of a distributed model, forward and backward; yields a report, complete at the end.

    Entering is collective over the machine, like :meth:`Machine.record`, which it uses. The first step also
    makes plans and exchanges addresses: for times, report a later one.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 4, 3, padding=1), {"H": -1})
    >>> with report(model) as step:
    ...     model(torch.rand(2, 1, 8, 8)).square().mean().backward()
    >>> step.messages > 0, step.moved  # print(step) shows a table
    (True, [])
    """
    if "distributed" not in vars(model):
        raise ConfigurationError("report: the model is not distributed")
    machine = vars(model)["distributed"].machine
    counters, seen = machine.segments.counters, StepReport()
    calls: dict[Site, Call] = {}

    def counted() -> tuple[float, ...]:
        sent = counters.bytes_put + counters.bytes_collective, counters.puts
        return *sent, COPIES.down, COPIES.up, COPIES.seconds

    def observe(rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if rule.kind in ("query", "value", "gradient"):
            return rule.handler(func, args, kwargs)
        site = site_of(machine, func)
        site.moved.clear()
        before, y, after = counted(), rule.handler(func, args, kwargs), counted()
        outputs = [_said(x) for x in tensors_in(y) if isinstance(x, SplitTensor)]
        inputs = tuple(_said(x) for x in tensors_in(args, kwargs) if isinstance(x, SplitTensor))
        function = name_of(func).rpartition(".")[2]
        empty = Call(site.path, function, site.location, rule.kind, inputs, ", ".join(outputs) or "-")
        call = calls.get(site, empty)
        calls[site] = replace(
            call,
            times=call.times + 1,
            **{
                name: getattr(call, name) + now - then
                for name, then, now in zip(_COUNTED, before, after, strict=True)
            },
            moved=tuple(sorted({*call.moved, *site.moved})),
        )
        return y

    OBSERVERS.append(observe)
    try:
        with machine.record() as recording:
            # After the ranks have met to begin the recording.
            start, waited = counted(), counters.seconds_waited
            yield seen
            seen.seconds = recording.now
    finally:
        OBSERVERS.remove(observe)
    for name, then, now in zip(_COUNTED, start, counted(), strict=True):
        setattr(seen, name, now - then)
    seen.waited = counters.seconds_waited - waited
    for site, call in calls.items():
        mine = [event for event in recording.events if event.name.startswith(site.name)]
        waited = sum(event.end - event.begin for event in mine if event.kind == "wait")
        travelled = sum(event.end - event.begin for event in mine if event.travels)
        seen.calls.append(replace(call, waited=waited, hidden=max(0.0, travelled - waited)))


def _said(x: SplitTensor) -> str:
    return f"{tuple(x.decomposition.shape)} {lay.described(x.decomposition)}"

"""A training step over two hosts, with overlap and without, with a progress engine and without."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.measure import COMM, summary, timed
from benchmarks.row import Row
from benchmarks.training_step import step_of
from distdl_rma import GradientSync, Machine, shard
from distdl_rma.layers import DistributedConv2d, DistributedMSELoss
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.collective import Collective
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.trace import chrome_trace

# Many weights and few pixels: the gradients of a layer travel for about as long as its backward computes.
LAYERS, CHANNELS, BATCH, SIDE = 6, 128, 1, 48
SHAPE = (BATCH, CHANNELS, SIDE, SIDE)
ROUNDS, REPETITIONS, WARM_UPS = 3, 11, 2

Step = Callable[[], object]
Switch = Callable[[], AbstractContextManager[None]]


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """Have everything be there before its start returns, by the same waits that come later otherwise.

    Nothing else changes: the same bytes travel by the same way, with the progress engine still running.
    """
    start_channel, start_collective = Channel.start, Collective.start

    def channel_start(channel: Channel, parts: Any) -> int:
        epoch = start_channel(channel, parts)
        reason = WaitReason((), f"to send in {channel.name!r}")
        channel._manager.waiter.until(lambda: channel.ready(epoch), lambda: reason)
        return epoch

    def collective_start(collective: Collective) -> None:
        start_collective(collective)
        collective._manager.waiter.until(collective._advance, collective._algorithm.waiting)

    with patch.object(Channel, "start", channel_start), patch.object(Collective, "start", collective_start):
        yield


# Those of one progress engine are interleaved.
ENGINES = ("thread", "none")
# Of the step with overlap, of the one that waits at once.
TARGETS = {"thread": 0.72, "none": 0.85}
SWITCHES: dict[str, Switch] = {"overlap": nullcontext, "waiting at once": waiting_at_once}


def network(conv: Callable[..., nn.Module]) -> nn.Sequential:
    """Convolutions with nothing but a ReLU between them."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [conv(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


@dataclass
class Measured:
    """Seconds per step on the slowest rank, by variant, and a trace of one step each."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)

    def median(self, variant: str) -> float:
        return statistics.median(self.seconds[variant])

    def ratio(self, engine: str) -> float:
        """Time with overlap over the time without."""
        on, off = (self.median(f"{engine}, {name}") for name in SWITCHES)
        return on / off

    def as_dict(self) -> dict[str, object]:
        """For the JSON of the results."""
        low_high = {name: statistics.quantiles(values, n=4)[::2] for name, values in self.seconds.items()}
        return {
            "seconds": {name: self.median(name) for name in self.seconds},
            "quartiles": low_high,
            "ratios": {engine: round(self.ratio(engine), 3) for engine in ENGINES},
            "targets": TARGETS,
            "network": f"{LAYERS} convolutions, {CHANNELS} channels, {BATCH} x {SIDE} x {SIDE}",
        }

    def rows(self) -> Iterator[Row]:
        """Steps with overlap against those that wait at once, by engine."""
        for engine in ENGINES:
            on, off = (
                summary([1e6 * seconds for seconds in self.seconds[f"{engine}, {name}"]]) for name in SWITCHES
            )
            what = f"training step, {LAYERS} convolutions, {CHANNELS} channels, two hosts, progress {engine}"
            yield Row(what, "waiting at once", *on, *off, TARGETS[engine])

    def write_traces(self, folder: Path) -> None:
        """Write the traces of this rank's gathering, one file per variant."""
        for name, trace in self.traces.items():
            (folder / f"step, {name}.json").write_text(trace)


def measure() -> Measured:
    """Time all variants, in rounds; collective."""
    measured = Measured()
    for _ in range(ROUNDS):
        local = torch.randn(BATCH, CHANNELS, SIDE // COMM.size, SIDE)
        plain = step_of(network(nn.Conv2d), local, local, nn.MSELoss())
        time_in_turn(measured, {"compute alone": (plain, nullcontext)})
        for progress in ENGINES:
            with Machine(COMM, progress=progress, segment_size="128MiB") as machine:
                measure_on(machine, progress, measured)
            # What the graph of the last step held of the machine goes before the next is made.
            gc.collect()
    return measured


def measure_on(machine: Machine, progress: str, measured: Measured) -> None:
    """Time and record the variants of one engine; collective."""
    P_x = machine.partition((1, 1, machine.size, 1))
    model = network(partial(DistributedConv2d, P_x))
    sync = GradientSync(model, machine)
    x = shard(P_x, torch.randn(SHAPE)).to_local()
    step = step_of(model, x, x, DistributedMSELoss(P_x, name="loss"))
    variants = {f"{progress}, {name}": (step, switch) for name, switch in SWITCHES.items()}
    time_in_turn(measured, variants)
    for name, (_, switch) in variants.items():
        with switch(), machine.record() as recording:
            step()
        if recordings := COMM.gather(recording):
            measured.traces[name] = chrome_trace(recordings)
    sync.close()


def time_in_turn(measured: Measured, variants: dict[str, tuple[Step, Switch]]) -> None:
    """Time steps of some variants by turns, after a warm-up; collective."""
    for repetition in range(WARM_UPS + REPETITIONS):
        for name, (step, switch) in variants.items():
            with switch():
                slowest = timed(step)
            if repetition >= WARM_UPS:
                measured.seconds.setdefault(name, []).append(slowest)

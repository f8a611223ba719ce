"""What the model of scaling takes from measurements: of wires, of calls, of compute, of whole steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from functools import partial
from math import prod

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.measure import COMM, WARM_UPS, in_turn
from benchmarks.scaling.cases import Case, Step
from benchmarks.training_step import step_of
from distdl_rma import Machine, shard
from distdl_rma.segments import Bcast, RemoteBuffer, SegmentBuffer

# Bytes of messages: one that costs nothing but its start, and two whose difference is all bytes.
SMALL, MIDDLE, LARGE = 8, 1 << 16, 1 << 20
# Notified puts in a row, whose start and whose wait are timed apart.
STREAM = 200
ROUNDS = 30
CALLS = 30
CHANNELS, SIDE = 4, 8


def quiet(seconds: Iterable[float]) -> float:
    """The lower quartile: whatever else runs on a machine only adds to times."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def wire(machine: Machine) -> dict[str, float]:
    """Seconds of LogGP between the first and the last rank: o of both ends, L, G per byte; messages of MPI.

    Of notified puts, as users of the segments see them: L is all that happens between both calls.
    Collective.
    """
    ends = machine.ranks[0], machine.ranks[-1]
    buffer = machine.segments.get_segment_buffer(LARGE, notifications=STREAM)
    found = None
    if machine.rank in ends:
        first = machine.rank == ends[0]
        peer = ends[first]
        remote = buffer.exchange({peer: ()})[peer]
        both = COMM.Create_group(COMM.group.Incl(ends))
        small, middle, large = (one_way(buffer, remote, nbytes, first) for nbytes in (SMALL, MIDDLE, LARGE))
        sends, receives = overheads(buffer, remote, first, both)
        found = {
            "o_send": sends,
            "o_receive": receives,
            "L": max(0.0, small - sends - receives),
            "G": max(0.0, large - middle) / (LARGE - MIDDLE),
        }
        found["mpi"] = message(machine)
        both.Free()
    constants: dict[str, float] = COMM.bcast(found)
    buffer.free()
    return constants


def one_way(buffer: SegmentBuffer, remote: RemoteBuffer, nbytes: int, first: bool) -> float:
    """Seconds from the start of a notified put to the end of the peer's wait: half of there and back."""
    data = np.zeros(nbytes, np.uint8)

    def send() -> None:
        remote.put_notify(data, 0)

    def receive() -> None:
        buffer.notify_wait(0)
        buffer.notify_reset(0)

    steps = (send, receive) if first else (receive, send)
    taken = []
    for _ in range(ROUNDS + WARM_UPS):
        begin = time.perf_counter()
        for step in steps:
            step()
        taken.append((time.perf_counter() - begin) / 2)
    # On the second rank a round ends with its send: only the first has whole rounds.
    return quiet(taken[WARM_UPS:])


def message(machine: Machine) -> float:
    """Seconds of a message of MPI within a collective, as waits of the library see it.

    Half of a broadcast from the first rank and one from the last, in turn; collective over both.
    """
    ends = machine.ranks[0], machine.ranks[-1]
    ways = [Bcast(machine.segments, ends, SMALL, np.uint8, root, f"from {root}") for root in ends]
    taken = []
    for _ in range(ROUNDS + WARM_UPS):
        begin = time.perf_counter()
        for way in ways:
            way.start()
            way.wait()
        taken.append((time.perf_counter() - begin) / 2)
    for way in ways:
        way.close()
    return quiet(taken[WARM_UPS:])


def overheads(
    buffer: SegmentBuffer, remote: RemoteBuffer, first: bool, both: MPI.Intracomm
) -> tuple[float, float]:
    """Seconds that a notified put keeps its sender, and that a wait for one that is there takes."""
    data, sends, receives = np.zeros(SMALL, np.uint8), [], []
    for _ in range(ROUNDS):
        both.Barrier()
        begin = time.perf_counter()
        if first:
            for at in range(STREAM):
                remote.put_notify(data, at)
            sends.append((time.perf_counter() - begin) / STREAM)
            remote.flush()
        both.Barrier()
        if not first:
            begin = time.perf_counter()
            for at in range(STREAM):
                buffer.notify_wait(at)
                buffer.notify_reset(at)
            receives.append((time.perf_counter() - begin) / STREAM)
    lasts = both.allgather(quiet(sends or receives))
    return lasts[0], lasts[1]


def layers() -> dict[str, nn.Module]:
    """Layers of the networks by kind; what they add to their functions does not depend on the channels."""
    c = CHANNELS
    return {
        "Conv": nn.Conv2d(c, c, 3, padding=1, bias=False),
        "Conv without halo": nn.Conv2d(c, c, 1),
        "BatchNorm": nn.BatchNorm2d(c),
        "ReLU": nn.ReLU(),
        "MaxPool": nn.MaxPool2d(2),
        "ConvTranspose": nn.ConvTranspose2d(c, c, 2, stride=2),
        "cat": _Twice(),
    }


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), 1)


def calls(machine: Machine, repetitions: int) -> dict[str, float]:
    """Seconds that a layer of each kind takes above its function on the blocks, forward and backward.

    On tensors so small that nothing else counts. What the kinds do not have of a step, as the loss, the begin
    and the end of a call, and the sum of the gradients, is that of a "step". Collective over two ranks.
    """
    P_x = machine.partition((1, 1, machine.size, 1))
    found = {}
    for kind, layer in layers().items():
        whole = torch.randn(1, CHANNELS, machine.size * SIDE, SIDE)
        x, block = shard(P_x, whole).requires_grad_(), whole[:, :, :SIDE].clone().requires_grad_()
        ways = {"split": there_and_back(layer, x), "alone": there_and_back(layer, block)}
        taken = in_turn(ways, repetitions, CALLS)
        found[kind] = quiet(a - b for a, b in zip(taken["split"], taken["alone"], strict=True))
    return found


def there_and_back(layer: nn.Module, x: torch.Tensor) -> Step:
    """Forward and backward of one layer."""
    gradient = torch.ones_like(layer(x).detach())

    def call() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(gradient)

    return call


def tiny_step(machine: Machine, case: Case, repetitions: int) -> float:
    """Seconds that a step takes above the one of a rank's tile alone, where both compute next to nothing."""
    extent = 4 << case.depth
    shape = (extent * machine.size, *(extent,) * (len(case.shape) - 1))
    ways = {
        "split": case.split_step(case.rows_of(machine), shape),
        "alone": case.tile_step((extent, *shape[1:])),
    }
    taken = in_turn(ways, repetitions, 2)
    return quiet(a - b for a, b in zip(taken["split"], taken["alone"], strict=True))


def compute(case: Case, repetitions: int) -> list[tuple[int, float]]:
    """Elements of a tile, and seconds of a step of the network alone on it, while other ranks do the same.

    By the kernels that ranks choose.

    From tiles of one of two ranks to those that take their time by their calls.
    """
    tiles, whole = [case.tile(2)], 1 << case.depth
    # Halved where they are longest, as long as all resolutions stay whole; batch norm wants two elements.
    while (longest := max(tiles[-1])) % (2 * whole) == 0 and prod(tiles[-1]) > 2 * whole ** len(tiles[-1]):
        at = tiles[-1].index(longest)
        tiles.append((*tiles[-1][:at], longest // 2, *tiles[-1][at + 1 :]))
    steps = {str(tile): case.tile_step(tile) for tile in tiles}
    taken = in_turn(steps, repetitions)
    return [(prod(tile), quiet(taken[str(tile)])) for tile in tiles]


def shares(case: Case, repetitions: int) -> dict[str, float]:
    """What part of a step of the network alone each module takes in its forward, by path; "" is the model."""
    x, target = case.image(case.tile(2))
    network, clock = case.network(), Clock()
    for path, module in network.named_modules():
        if not path or not list(module.children()):
            module.register_forward_pre_hook(partial(clock.begin, path))
            module.register_forward_hook(partial(clock.end, path))
    (taken,) = in_turn({"step": step_of(network, x, target, F.mse_loss)}, repetitions).values()
    whole = quiet(taken)
    return {path: quiet(each[WARM_UPS:]) / whole for path, each in clock.seconds.items()}


class Clock:
    """Seconds between the begin and the end of what has a name, for every time that it happens."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._begun: dict[str, float] = {}

    def begin(self, name: str, *_: object) -> None:
        """Begin something; further arguments are those of a hook."""
        self._begun[name] = time.perf_counter()

    def end(self, name: str, *_: object) -> None:
        """End it."""
        self.seconds.setdefault(name, []).append(time.perf_counter() - self._begun[name])


def step(machine: Machine, case: Case, repetitions: int) -> float:
    """Seconds of a step on split tensors."""
    (taken,) = in_turn({"step": case.split_step(case.rows_of(machine))}, repetitions).values()
    return quiet(taken)

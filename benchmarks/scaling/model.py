"""Seconds of a training step on thousands of ranks, from constants measured on two."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.scaling.cases import Case
from benchmarks.scaling.layers import Layer, layers_of
from benchmarks.scaling.loggp import Network, Wire
from benchmarks.scaling.plans import Cluster, Movement, Planned, Vote, gradients, loss, planned

MEASURED = Path(__file__).with_name("measured.json")
# A backward takes twice as long as its forward.
BACKWARD = 2


@dataclass(frozen=True)
class Constants:
    """What was measured, in seconds.

    ``wires`` by name; ``calls`` are what layers take above their functions, by kind; ``tiny`` what a whole
    step does, by network; ``compute`` are elements of tiles and steps on them; ``shares`` the parts of a step
    that the forwards of modules take, by network and path, ``""`` for all of it; ``steps`` whole steps to
    compare with.
    """

    wires: Mapping[str, Wire]
    calls: Mapping[str, float]
    tiny: Mapping[str, float]
    compute: Mapping[str, Sequence[tuple[int, float]]]
    shares: Mapping[str, Mapping[str, float]]
    steps: Mapping[str, float]

    @classmethod
    def read(cls, path: Path = MEASURED) -> Constants:
        """Those that are kept beside this file."""
        told: dict[str, Any] = json.loads(path.read_text())
        wires = {name: Wire(**values) for name, values in told["wires"].items()}
        names = "calls", "tiny", "compute", "shares", "steps"
        return cls(wires, *(told[name] for name in names))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step: of compute, of calls of the library, and what communication adds to both."""

    compute: float
    calls: float
    halos: float
    norms: float
    gradients: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.calls + self.halos + self.norms + self.gradients


def step_seconds(case: Case, constants: Constants, network: Network, crowd: float = 1.0) -> Prediction:
    """A step of a network whose image is as large as the case says.

    Of the rank with most neighbours, which has a tile as large as any. ``crowd`` ranks share a core: what the
    processor does takes so many times as long.
    """
    cluster, shares, layers = network.cluster, constants.shares[case.name], _layers(case)
    compute = crowd * tile_seconds(constants.compute[case.name], tile_volume(case, cluster))
    if cluster.size == 1:
        return Prediction(compute, 0.0, 0.0, 0.0, 0.0)
    me = cluster.middle
    halos = norms = 0.0
    for plan in (planned(layer, cluster, me) for layer in layers):
        forward = compute * shares.get(plan.layer.path, 0.0)
        halos += (1 + BACKWARD) * forward * beside(plan)
        for hides, communications in ((forward, plan.forward), (BACKWARD * forward, plan.backward)):
            spans = [network.span(each, me).slowed(crowd) for each in communications]
            if plan.layer.kind == "BatchNorm":
                norms += sum(span.whole for span in spans)
            else:
                halos += sum(span.behind(hides) for span in spans)
    told = 2 * network.span(Vote(), me).whole + network.span(loss(), me).whole
    summed = exposed_gradients(layers, {path: compute * share for path, share in shares.items()}, network)
    return Prediction(compute, crowd * (constants.tiny[case.name] + told), halos, norms, summed)


def beside(plan: Planned) -> float:
    """Elements of the halo for each of the own: these are convolved as well."""
    found = [each.exchange for each in plan.forward if isinstance(each, Movement)]
    received = sum(piece.box.volume for exchange in found for piece in exchange.receives)
    return received / found[0].own.volume if found else 0.0


def exposed_gradients(layers: Sequence[Layer], forwards: Mapping[str, float], network: Network) -> float:
    """Seconds that the sums of gradients add to a backward of layers with these seconds of their forwards.

    A sum starts when the layer that comes last in it has its gradients, and when the one before has ended.
    """
    at, there = 0.0, dict[str, float]()
    for layer in reversed(layers):
        at += BACKWARD * forwards.get(layer.path, 0.0)
        there[layer.path] = at
    busy = end = 0.0
    for members, total in gradients(list(layers)):
        span = network.span(total, network.cluster.middle)
        end = max(end, *(there[layer.path] for layer in members)) + span.travels
        busy += span.busy
    return busy + max(0.0, end - at)


def call_seconds(case: Case, constants: Constants) -> dict[str, tuple[int, float]]:
    """Calls of each kind of layer in a step, and seconds of all of them; and "the rest" of a step."""
    kinds = [layer.kind for layer in _layers(case)]
    found = {kind: (kinds.count(kind), kinds.count(kind) * constants.calls[kind]) for kind in constants.calls}
    rest = constants.tiny[case.name] - sum(seconds for _, seconds in found.values())
    return {**found, "the rest": (1, rest)}


@cache
def _layers(case: Case) -> list[Layer]:
    return layers_of(case.network(), (1, 1, *case.shape))


def tile_volume(case: Case, cluster: Cluster) -> int:
    """Elements of the largest tile."""
    return math.prod(-(-n // p) for n, p in zip(case.shape, cluster.grid[2:], strict=True))


def tile_seconds(measured: Sequence[tuple[int, float]], volume: float) -> float:
    """Seconds of a step on a tile: between two that were measured as a power of the elements.

    Beyond the largest in proportion to the elements, below the smallest as long as that.
    """
    points = sorted((float(n), seconds) for n, seconds in measured)
    at = bisect_left(points, (volume, 0.0))
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1] * volume / points[-1][0]
    (n, low), (m, high) = points[at - 1 : at + 1]
    power = math.log(high / low) / math.log(m / n)
    return low * math.pow(volume / n, power)

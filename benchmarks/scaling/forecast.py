"""What is predicted and shown: larger images on 1 to 4,096 ranks, and the steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.loggp import Network, Wire
from benchmarks.scaling.model import Constants, Prediction, step_seconds
from benchmarks.scaling.plans import Cluster

SIZES = tuple(1 << n for n in range(13))
# Images that still leave a tile to each of 4,096 ranks.
LARGE = {"U-Net": (8192, 8192), "3-D U-Net": (384, 384, 384)}
PER_NODE = 2
# Wires of steps that were measured, and ranks, ranks of a node and ranks that share a core there.
NODE, SLOW, LATE, FAST = "one node", "2 hosts, 1 Gbit/s", "2 hosts, 1 Gbit/s, 1 ms", "2 hosts, no limit"
CHECKS = ((2, NODE, 2, 1), (2, SLOW, 1, 1), (2, LATE, 1, 1), (4, SLOW, 2, 2), (4, LATE, 2, 2))
ASSUMED = "assumed: L 2 us, 100 Gbit/s"


@dataclass(frozen=True)
class Check:
    """A step that was measured, with what the model says of it; ``crowd`` ranks shared a core."""

    case: Case
    ranks: int
    where: str
    measured: float
    predicted: Prediction


def wires(constants: Constants) -> dict[str, Wire]:
    """Wires between nodes by name: the measured ones, and one that a cluster may have."""
    near = constants.wires[NODE]
    fast = Wire(near.o_send, near.o_receive, 2e-6, 8 / 100e9, 2e-6 + near.o)
    return {name: constants.wires[name] for name in (SLOW, FAST)} | {ASSUMED: fast}


def grid_of(size: int, dims: int) -> tuple[int, ...]:
    """A grid as near to a square or a cube as powers of two allow."""
    grid = [1] * dims
    for at in range(size.bit_length() - 1):
        grid[at % dims] *= 2
    return (1, 1, *grid)


def on(constants: Constants, wire: Wire, grid: tuple[int, ...], per_node: int = PER_NODE) -> Network:
    """A cluster with a wire between its nodes."""
    return Network(Cluster(grid, per_node), constants.wires[NODE], wire)


def strong(case: Case, constants: Constants, wire: Wire, size: int) -> Prediction:
    """A step of the large image on so many ranks."""
    grid = grid_of(size, len(case.shape))
    return step_seconds(replace(case, shape=LARGE[case.name]), constants, on(constants, wire, grid))


def weak(case: Case, constants: Constants, wire: Wire, size: int) -> Prediction:
    """A step on so many ranks, of which each has half of the image that is measured."""
    grid, tile = grid_of(size, len(case.shape)), case.tile(2)
    shape = tuple(n * parts for n, parts in zip(tile, grid[2:], strict=True))
    return step_seconds(replace(case, shape=shape), constants, on(constants, wire, grid))


def checks(constants: Constants) -> list[Check]:
    """All steps that were measured, beside what the model says of them."""
    found = []
    for case in CASES:
        for ranks, where, per_node, crowd in CHECKS:
            measured = constants.steps[f"{case.name}, {ranks} ranks, {where}"]
            grid = (1, 1, ranks, *(1,) * (len(case.shape) - 1))
            network = on(constants, constants.wires[where], grid, per_node)
            predicted = step_seconds(case, constants, network, crowd)
            found.append(Check(case, ranks, where, measured, predicted))
    return found

"""Messages and bytes per rank, counted from the schedules: ``python -m benchmarks.counting``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from benchmarks.traffic import Traffic, allreduce_traffic, broadcast_traffic, exchange_traffic
from distdl_rma import Partition
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.collectives.node_layout import NodeLayout

# Ranks, ranks per node, and the grid of the halo exchange.
MACHINES = (
    (2, 4, (2, 1)),
    (8, 4, (4, 2)),
    (16, 16, (4, 4)),
    (64, 4, (8, 8)),
    (64, 16, (8, 8)),
    (256, 16, (16, 16)),
    (256, 64, (16, 16)),
    (1024, 4, (32, 32)),
    (1024, 64, (32, 32)),
)
GRADIENTS = 25 << 18  # elements of float32: 25 MiB
STATISTICS = 128  # elements of float64: 1 KiB
TILE = 256  # each rank's tile of 16 channels of float32, halo of one


def main() -> None:
    """Print a Markdown table; each entry is that of the busiest rank."""
    print("| ranks | per node | allreduce 25 MiB | allreduce 1 KiB | broadcast 25 MiB | halo, 2-D |")
    print("|---:|---:|---:|---:|---:|---:|")
    for size, per_node, grid in MACHINES:
        cells = [busiest(layouts(size, per_node), kind) for kind in (gradients, statistics, weights)]
        cells.append(entry(max(halos(grid), key=lambda traffic: traffic.nbytes)))
        print(f"| {size} | {min(size, per_node)} | {' | '.join(cells)} |")


def layouts(size: int, per_node: int) -> list[NodeLayout]:
    ranks = tuple(range(size))
    nodes = tuple(ranks[begin : begin + per_node] for begin in range(0, size, per_node))
    return [NodeLayout(ranks, nodes, me) for me in ranks]


def gradients(layout: NodeLayout) -> Traffic:
    return allreduce_traffic(layout, GRADIENTS, 4)


def statistics(layout: NodeLayout) -> Traffic:
    return allreduce_traffic(layout, STATISTICS, 8, one_round=True)


def weights(layout: NodeLayout) -> Traffic:
    return broadcast_traffic(layout, 0, 4 * GRADIENTS)


def halos(grid: tuple[int, ...]) -> Iterator[Traffic]:
    size = math.prod(grid)
    extents = (16, *(TILE * n for n in grid))
    window = Window(3, left=1, right=1)
    for me in range(size):
        P_x = Partition(tuple(range(size)), (1, *grid), me=me)
        own = Decomposition.balanced(P_x, extents)
        reads = {
            d: WindowSplit(Balanced(window.outputs(extents[d]), parts), window, extents[d])
            for d, parts in enumerate((1, *grid))
            if d
        }
        yield exchange_traffic(Exchange(me, own, own.with_splits(reads)), 4)


def busiest(ranks: list[NodeLayout], kind: Callable[[NodeLayout], Traffic]) -> str:
    return entry(max(map(kind, ranks), key=lambda traffic: (traffic.nbytes, traffic.messages)))


def entry(traffic: Traffic) -> str:
    kib = traffic.nbytes / 1024
    size = f"{kib / 1024:.1f} MiB" if kib >= 1024 else f"{kib:.1f} KiB"
    return f"{traffic.messages}, {size}"


if __name__ == "__main__":
    main()

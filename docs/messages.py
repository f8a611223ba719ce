"""The page docs/messages.md: what a rank sends and hands to MPI in each call, on up to thousands of ranks.

``python docs/messages.py`` writes it; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from benchmarks.scaling.cases import Case
from benchmarks.scaling.layers import Layer, layers_of
from benchmarks.scaling.plans import (
    Cluster,
    Communication,
    Movement,
    Planned,
    Staged,
    Sum,
    Vote,
    loss,
    outcome,
    planned,
)
from benchmarks.traffic import Traffic
from distdl_rma import Partition
from distdl_rma.geometry import Decomposition, Exchange, trees
from distdl_rma.layers.ops.linear import ROWS, LinearGrid, grid_of_workers

__all__ = ["PAGE", "busiest", "calls", "grid_of", "written"]

PAGE = Path(__file__).with_name("messages.md")
SIZES = (1, 2, 8, 64, 512, 1024, 4096)
PER_NODE = (16, 1)
TILE, CHANNELS = 64, 16
GRADIENTS = 1 << 18  # elements of float32 in a bucket
# A tensor of a MiB: rows of the batch, and features, of which every one of up to 4,096 ranks may have some.
BATCH, FEATURES = 64, 4096

HEAD = f"""# Messages of a rank

Written by `docs/messages.py` from the plans that the library makes, and from the schedules of its
collectives, for simulated ranks; tests compare them with what real ranks count. Messages are puts, gets, and
calls of MPI's collectives between nodes, each of these taken for as many as a logarithm of the nodes; bytes
are those that a rank puts, gets, and hands to MPI. A cell is the rank that has most. The tensors are images
of {CHANNELS} channels, of which every rank has a tile of {TILE} x {TILE}, on a square grid of ranks.
"""
TAIL = """\
Ranks of a node read each other's memory, so that some numbers grow with the ranks of a node, and none with
the ranks beyond: an allreduce loads a share from each of the node's ranks, and each of them reads the board
of the node. Up to 32 ranks small sums take one round, a message from each to each; beyond, they go by nodes.
Shares of sums of 16 MiB and more, and vectors that are given to all, go between nodes in two to four pieces:
so many times the messages, and the same bytes.

Copies, sums over copies, and what comes together on one rank go in [stages over
nodes](protocol.md#movements-in-stages-over-nodes), so that each element comes to a node once. Up to 32 ranks
that are alone on their nodes, and all ranks of one node, exchange at once. Other movements have as many
messages as there are blocks that meet: a repartition from rows to columns sends a part to every rank of the
other grid.
"""


def calls() -> dict[str, Callable[[Cluster, int], tuple[Communication, ...]]]:
    """What a rank communicates in each call, by what it is."""
    return {
        "call of a distributed model: begin and end": lambda _cluster, _me: (Vote(), Vote()),
        "plain shards enter a layer": lambda _cluster, _me: (Vote(),),
        "convolution 3x3, forward": lambda cluster, me: plan("Conv", cluster, me).forward,
        "convolution 3x3, backward": lambda cluster, me: plan("Conv", cluster, me).backward,
        "batch norm, forward": lambda cluster, me: plan("BatchNorm", cluster, me).forward,
        "batch norm, backward": lambda cluster, me: plan("BatchNorm", cluster, me).backward,
        "linear layer, rows of the input split": lambda _cluster, _me: (),
        "loss": lambda cluster, _me: (loss(),) * (cluster.size > 1),
        "call of a layer, told to ranks that keep copies only": lambda _cluster, _me: (outcome(),),
        "gradients of a bucket of 1 MiB": lambda _cluster, _me: (Sum(GRADIENTS, 4),),
        "`AllGather` of 1 MiB": lambda cluster, me: (gathered(cluster, me),),
        "`ReduceScatter` of 1 MiB": lambda cluster, me: (gathered(cluster, me).back,),
        "`AllSumReduce` of 1 MiB": all_summed,
        "linear layer, features of 1 MiB split, forward": linear,
        "linear layer, features of 1 MiB split, backward": lambda cluster, me: tuple(
            each.back for each in linear(cluster, me)
        ),
        "weight of 1 MiB on a root, forward": lambda cluster, me: (from_root(cluster, me),),
        "weight of 1 MiB on a root, backward": lambda cluster, me: (from_root(cluster, me).back,),
        "state of 1 MiB at one rank": lambda cluster, me: (
            Staged(gathered(cluster, me).source, from_root(cluster, me).source),
        ),
    }


def gathered(cluster: Cluster, me: int) -> Staged:
    """Features in blocks, a block for each rank, that all ranks get."""
    P = Partition(cluster.ranks, (1, cluster.size), me)
    shape = (BATCH, FEATURES)
    return Staged(Decomposition.balanced(P, shape), Decomposition.balanced(P, shape, replicate=(1,)))


def from_root(cluster: Cluster, me: int) -> Staged:
    """A tensor of the first rank, that all ranks get."""
    root, users = (Partition(ranks, (len(ranks),), me) for ranks in (cluster.ranks[:1], cluster.ranks))
    shape = (BATCH, FEATURES)
    return Staged(Decomposition.replicated(root, shape), Decomposition.replicated(users, shape))


def linear(cluster: Cluster, me: int) -> tuple[Staged, ...]:
    """A layer with a block of rows of its weight on each rank: features are gathered."""
    P_x = Partition(cluster.ranks, (1, cluster.size), me)
    source, grid = Decomposition.balanced(P_x, (BATCH, FEATURES)), grid_of_workers(P_x, ROWS)
    layer = LinearGrid(grid, FEATURES, FEATURES)
    made = layer.outputs(source.shape)
    return Staged(source, layer.inputs(source.shape)), Staged(made, Decomposition.balanced(P_x, made.shape))


def all_summed(cluster: Cluster, me: int) -> tuple[Communication, ...]:
    """Copies on all ranks that are summed to all of them."""
    groups, count = (cluster.ranks,), BATCH * FEATURES
    stages = trees.all_reduction(groups, [count], lambda rank: rank // cluster.per_node, me)
    return tuple(Movement(Exchange(me, *stage)) for stage in stages)


def plan(kind: str, cluster: Cluster, me: int) -> Planned:
    """What the second layer of its kind communicates in a network on tiles of this size."""
    return planned([layer for layer in _layers(cluster.grid) if layer.kind == kind][1], cluster, me)


@cache
def _layers(grid: tuple[int, ...]) -> list[Layer]:
    shape = (1, 1, *(TILE * n for n in grid[2:]))
    return layers_of(Case("", CHANNELS, 1, (1,)).network(), shape)


def grid_of(size: int) -> tuple[int, ...]:
    """Ranks on a grid as square as a power of two allows."""
    rows = 1 << (size.bit_length() - 1) // 2
    return (1, 1, rows, size // rows)


def busiest(call: Callable[[Cluster, int], tuple[Communication, ...]], cluster: Cluster) -> Traffic:
    """What the rank with most messages sends in a call."""
    totals = []
    for me in sorted({0, cluster.middle}):
        total = Traffic(across=len(cluster.nodes))
        for each in call(cluster, me):
            traffic = each.traffic(cluster, me)
            for name in ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective"):
                setattr(total, name, getattr(total, name) + getattr(traffic, name))
        totals.append(total)
    return max(totals, key=lambda traffic: (traffic.messages, traffic.nbytes))


def written() -> str:
    """The page, as it should be."""
    return "\n".join([HEAD, *tables(), TAIL])


def tables() -> Iterator[str]:
    """A table for each number of ranks of a node."""
    for per_node in PER_NODE:
        yield f"## {'A rank' if per_node == 1 else f'{per_node} ranks'} on each node\n"
        yield f"| messages, bytes | {' | '.join(f'{size:,}' for size in SIZES)} |"
        yield f"|---|{'---:|' * len(SIZES)}"
        clusters = [Cluster(grid_of(size), per_node) for size in SIZES]
        # Calls that send the same share a row.
        rows: dict[str, list[str]] = {}
        for name, call in calls().items():
            cells = (busiest(call, cluster) for cluster in clusters)
            row = " | ".join(f"{cell.messages}, {shown(cell.nbytes)}" for cell in cells)
            rows.setdefault(row, []).append(name)
        yield from (f"| {'; '.join(names)} | {row} |" for row, names in rows.items())
        yield ""


def shown(nbytes: int) -> str:
    """Bytes to three digits."""
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    power, unit = (20, "MiB") if nbytes >= 1000 << 10 else (10, "KiB")
    return f"{nbytes / (1 << power):.3g} {unit}"


if __name__ == "__main__":
    PAGE.write_text(written())

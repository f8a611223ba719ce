"""A layer of your own: ``mpiexec -n 2 python -m mpi4py examples/response_norm.py``.

A local response norm divides each element by a power of the mean square of its neighbours among the channels,
which may be split. The operation states what each rank reads, from decompositions alone, and what it computes
of that. Halos, uneven and empty shards, the backward, agreement on shapes, errors on all ranks, idle ranks,
traces and names come with it. ``docs/architecture.md`` says what belongs to a layer of the library.
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import MPIPartition, Partition, shard
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer


class ResponseNorm(GatherComputeScatter):
    def __init__(
        self, site: CallSite, source: Decomposition, dtype: torch.dtype, size: int, *constants: float
    ) -> None:
        active = source.partition.active
        super().__init__(site, reads=active, works=active, output=source)
        self.size, self.constants = size, constants
        window = Window(size, left=size // 2, right=(size - 1) // 2)
        reads = source.with_splits({1: WindowSplit(source.splits[1], window, source.shape[1])})
        self.gather = movement_or_none(site, source, reads, dtype, "channels")
        if active:
            own, read = (each.box(site.machine.rank).bounds[1] for each in (source, reads))
            self.own = slice(own[0] - read[0], own[1] - read[0])

    def compute(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        # Beyond what is read there are no channels, or only windows of other ranks' elements.
        return F.local_response_norm(x, self.size, *self.constants)[:, self.own]


class DistributedLocalResponseNorm(OperatorLayer[ResponseNorm], nn.LocalResponseNorm):
    def __init__(
        self, P_x: Partition, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0, **named: Any
    ) -> None:
        super().__init__(P_x, **named)
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def plan(self, facts: dict[int, InputFacts]) -> ResponseNorm:
        source, dtype = source_of(self.P_x, facts)
        return ResponseNorm(self.site, source, dtype, self.size, self.alpha, self.beta, self.k)


def main() -> None:
    P_world = MPIPartition(MPI.COMM_WORLD)
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    expected = nn.LocalResponseNorm(3, alpha=0.5)(x)
    expected.square().sum().backward()
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    mine = shard(P_x, x.detach()).to_local().requires_grad_()
    y = DistributedLocalResponseNorm(P_x, 3, alpha=0.5)(mine)
    y.square().sum().backward()
    torch.testing.assert_close(y, shard(P_x, expected.detach()).to_local())
    torch.testing.assert_close(mine.grad, shard(P_x, x.grad).to_local())
    if P_world.rank == 0:
        print(f"{P_world.size} ranks: output and gradient are those of torch's layer")


if __name__ == "__main__":
    main()

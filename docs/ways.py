"""The way of a call: which files and functions it enters, in this order; a table on the terminal.

``mpiexec -n 2 python -m mpi4py docs/ways.py`` shows a convolution, forward and backward, whose image is cut
into rows: as a ``DistributedConv2d`` in a ``GradientSync``, and as an ``nn.Conv2d`` in a distributed model.
Each has run a few steps, so that plans are kept. Calls that wait for other ranks differ from run to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distdl_rma import GradientSync, MPIPartition, Partition, distribute, print0, shard
from distdl_rma.layers import DistributedConv2d
from distdl_rma.layers.split.shard import balanced_block

__all__ = ["entered", "ways"]

PACKAGE = "/distdl_rma/"
Way = dict[str, list[str]]


def entered(act: Callable[[], Any]) -> tuple[Way, Any]:
    """Files of the package with the functions that a call enters on this thread, and the call's result."""
    way: Way = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename and code.co_name[0] != "<":
            functions = way.setdefault(code.co_filename.rpartition(PACKAGE)[2], [])
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)

    sys.setprofile(look)
    try:
        return way, act()
    finally:
        sys.setprofile(None)


def ways(P_world: Partition) -> dict[str, Way]:
    """The ways of a convolution and of its backward, as a layer and as a split tensor's; collective."""
    torch.manual_seed(0)
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    # Large enough that halos are convolved apart.
    x = torch.randn(1, 16, 128, 128)
    layer = DistributedConv2d(P_x, 16, 16, 3, padding=1)
    with GradientSync(layer, P_world):
        of_layer = _of(layer, balanced_block(P_x, x).requires_grad_())
    model: Any = distribute(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), P_x)
    of_model = _of(model, shard(P_x, x))
    model.distributed.close()
    names = "a layer", "the backward of a layer", "a split tensor", "the backward of a split tensor"
    return dict(zip(names, (*of_layer, *of_model), strict=True))


def _of(module: nn.Module, x: torch.Tensor) -> tuple[Way, Way]:
    def call() -> Any:
        # In one place of the program, which keeps the operation.
        return module(x)

    for _ in range(3):
        call().sum().backward()
    forward, y = entered(call)
    # A backward runs on the thread that calls it, tensors of the processor being all there are.
    return forward, entered(y.sum().backward)[0]


if __name__ == "__main__":
    for name, way in ways(MPIPartition(MPI.COMM_WORLD)).items():
        print0(f"\nThe way of {name} through a convolution\n")
        for file, functions in way.items():
            print0(f"  {file:48s} {', '.join(functions)}")

"""Loss scaling for half-precision types, if ranks hold different parts of the weights.

A scaler skips a step whose gradients overflowed, and halves the scale. If one rank skips alone, its weights
differ from those of the others from then on. One allreduce of a maximum, with the scale and its negative
beside the flag, tells whether any rank overflowed, and whether all have one scale.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import MismatchError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import uncompiled
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.machine import Machine


def _in_reals(parameter: torch.Tensor) -> torch.Tensor:
    # A complex parameter as pairs of real numbers, which torch can unscale.
    if parameter.grad is None or not parameter.is_complex():
        return parameter
    pairs = torch.view_as_real(parameter.detach())
    pairs.grad = torch.view_as_real(parameter.grad)
    return pairs


class DistributedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks agree on whether a step is skipped.

    Torch's own scaler suffices for copies of weights that a :class:`GradientSync` keeps equal: their
    gradients are equal on all ranks. If ranks hold different blocks of a weight, one block may overflow
    alone, and the ranks would go on with different scales. This scaler skips a step on all ranks if any rank
    found a value that is not finite.

    ``step`` and ``unscale_`` are collective over the machine and block. ``machine`` may be a partition of its
    ranks; ``arguments`` are torch's without the device, which is that of the loss. ``MismatchError`` on all
    ranks if their scales differ.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> model = nn.Linear(2, 1)
    >>> optimizer, scaler = torch.optim.SGD(model.parameters()), DistributedGradScaler(P_world)
    >>> scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(self, machine: Machine | Partition, **arguments: Any) -> None:
        super().__init__("cpu", **arguments)
        home = Machine.of(machine)
        self._found = Allreduce(home.segments, home.ranks, 3, np.float32, "max", "GradScaler")

    @uncompiled
    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        # Torch's own extension point for sharded parameters.
        groups = [{"params": [_in_reals(p) for p in group["params"]]} for group in optimizer.param_groups]
        in_reals: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(in_reals, *arguments)
        # One copy from a device, where the scale is, too.
        here: Any = self._scale
        *mine, scale = torch.stack([x.to(here.device) for x in (*found.values(), here)]).tolist()
        anywhere, largest, negative = self._found([max(mine, default=0.0), scale, -scale]).tolist()
        if largest != -negative:
            raise MismatchError(
                f"GradScaler: the scale is {largest} on one rank and {-negative} on another: give all ranks"
                " one init_scale, and load one state"
            )
        return {torch.device("cpu"): torch.full((), anywhere, dtype=torch.float32)}

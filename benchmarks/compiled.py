"""A compiled model beside the split model and the bare half of the work, on two ranks.

``mpiexec -n 2 python -m mpi4py -m benchmarks.compiled``

Forward, loss and backward with the sums of gradients, by turns; medians of the slower rank. The bare half is
the model alone on half of the image, on both ranks at once. ``replay`` has the model in the replay, ``step``
also its loss.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import capture, distribute, shard


def block() -> nn.Module:
    """A convolution, a norm and an activation."""
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())


def unet() -> nn.Module:
    """A public network."""
    nets: Any = import_module("monai.networks.nets")
    features = (16, 16, 32, 64, 128, 16)
    made: nn.Module = nets.BasicUNet(2, in_channels=1, out_channels=2, features=features, upsample="deconv")
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int, int, int]] = {
    # The model, channels in and out, extent, samples, and steps in each.
    "block 16 x 16": (block, 16, 16, 16, 200, 5),
    "block 128 x 128": (block, 16, 16, 128, 100, 2),
    "BasicUNet 256 x 256": (unet, 1, 2, 256, 24, 1),
}


def measure(name: str) -> dict[str, float]:
    """Microseconds of a step, by variant; collective."""
    make, into, out, side, samples, steps = CASES[name]
    torch.manual_seed(1)
    alone = make()
    made: list[Any] = [distribute(copy.deepcopy(alone), {"H": -1}) for _ in range(3)]
    split, compiled, of_step = made
    compiled.compile()
    step = capture(lambda x, target: F.mse_loss(of_step(x), target))
    whole = torch.rand(1, into, side, side), torch.rand(1, out, side, side)
    blocks = tuple(shard({"H": -1}, x) for x in whole)
    half = tuple(x[:, :, : side // 2].contiguous() for x in whole)
    variants: dict[str, tuple[nn.Module, Callable[..., torch.Tensor], Any]] = {
        "split": (split, lambda x, target: F.mse_loss(split(x), target), blocks),
        "replay": (compiled, lambda x, target: F.mse_loss(compiled(x), target), blocks),
        "step": (of_step, step, blocks),
        "bare": (alone, lambda x, target: F.mse_loss(alone(x), target), half),
    }
    seconds: dict[str, list[float]] = {each: [] for each in variants}
    for at in range(samples):
        for each, (model, function, given) in variants.items():
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            for _ in range(steps):
                model.zero_grad()
                function(*given).backward()
            if at > 1:
                seconds[each].append(time.perf_counter() - began)
    found = {each: 1e6 * statistics.median(all_of) / steps for each, all_of in seconds.items()}
    for handle in made:
        handle.distributed.close()
    return {each: max(MPI.COMM_WORLD.allgather(time)) for each, time in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        times = measure(case)
        text = ", ".join(f"{each} {us:,.0f} us ({us / times['bare']:.2f})" for each, us in times.items())
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{case}: {text}\n")
            sys.stdout.flush()

"""See what overlaps: ``mpiexec -n 4 python -m mpi4py examples/overlap.py [--output DIR]``.

A few training steps of a small network whose images are split along their height, the last one recorded:
what every rank does in each moment, and what travels meanwhile. It becomes a picture, and a trace to look at
in a browser: https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

from distdl_rma import GradientSync, Machine, Partition, shard
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss
from distdl_rma.trace import chrome_trace
from overlap_picture import draw

COMM = MPI.COMM_WORLD
LAYERS, CHANNELS, SIDE = 4, 32, 192
PICTURE, TRACE = "overlap.png", "overlap.json"


def network(P_x: Partition) -> nn.Sequential:
    """Convolutions, each with a norm behind it; their names are those in the picture."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for k in range(1, LAYERS + 1):
        inputs = 3 if k == 1 else CHANNELS
        layers += [
            DistributedConv2d(P_x, inputs, CHANNELS, 3, padding=1, bias=False, name=f"conv {k}"),
            DistributedInstanceNorm2d(P_x, CHANNELS, affine=True, name=f"norm {k}"),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(
        *layers, DistributedConv2d(P_x, CHANNELS, 3, 3, padding=1, name=f"conv {LAYERS + 1}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="overlap.py", description="Record a training step on all ranks.")
    parser.add_argument("--output", type=Path, default=Path("overlap-output"), help="folder (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="the last one is recorded (%(default)s)")
    chosen = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks share the cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // COMM.size))

    with Machine(COMM) as machine:
        P_x = machine.partition((1, 1, machine.size, 1))
        model, criterion = network(P_x), DistributedMSELoss(P_x, name="loss")
        # One allreduce per layer, so that each is seen.
        sync = GradientSync(model, machine, bucket_nbytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        image = torch.rand(1, 3, SIDE, SIDE)
        x = shard(P_x, image).to_local()

        def step() -> None:
            optimizer.zero_grad()
            criterion(model(x), x).backward()
            optimizer.step()

        # The first steps connect the ranks and make plans.
        for _ in range(chosen.steps - 1):
            step()
        with machine.record() as recording:
            step()
        recordings = COMM.gather(recording)
        sync.close()

    if recordings:
        chosen.output.mkdir(parents=True, exist_ok=True)
        text = chrome_trace(recordings)
        (chosen.output / TRACE).write_text(text)
        title = f"One training step on {COMM.size} ranks: above what travels, below what the rank does"
        draw({title: json.loads(text)}, chosen.output / PICTURE)
        print(f"picture: {chosen.output / PICTURE}")
        print(f"trace for ui.perfetto.dev: {chosen.output / TRACE}")


if __name__ == "__main__":
    main()

"""Replicas by torch, split images by us: ``mpiexec -n 4 python -m mpi4py examples/ddp.py --replicas 2``.

A mesh of ranks with two axes: replicas have pictures of their own, and within a replica every picture is cut
in rows. ``distribute`` has the network compute on cut pictures; torch's DistributedDataParallel, on the
backend "rma", adds up the gradients of all ranks while backward goes on. At the end one process trains alone
on the pictures of all replicas: the weights must be the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from demo_terminal import (
    COMM,
    CONSOLE,
    Mistake,
    Parser,
    announce_proof,
    difference,
    leave,
    measured,
    prepared,
    prove,
    show_training,
    shown,
    steps,
    wait_asleep,
)
from distdl_rma import Machine, MPIPartition, distribute

WIDTH, BATCH, SIZE = 16, 2, (96, 80)
LIMIT = 1e-9


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    replicas: int
    steps: int


def options() -> Options:
    """Options from the command line; a ``Mistake`` if they do not fit the ranks."""
    parser = Parser(prog="ddp.py", description="Train replicas of a split network on MPI ranks.")
    parser.add_argument("--replicas", type=replicas, default=1 + (COMM.size % 2 == 0), help="(%(default)s)")
    parser.add_argument("--steps", type=steps, default=20, help="of training (%(default)s)")
    chosen = Options(**vars(parser.parse_args()))
    if COMM.size % chosen.replicas:
        raise Mistake(f"{COMM.size} ranks do not make {chosen.replicas} replicas of equal size")
    return chosen


def replicas(text: str) -> int:
    """Number of replicas."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1 replica is needed, not {text!r}")
    return int(text)


def network() -> nn.Module:
    """A plain network, with the same weights on all ranks; in double precision, for the proof."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [
        nn.Conv2d(1, WIDTH, 5, padding=2, bias=False),  # the norm takes out what a bias would add
        nn.InstanceNorm2d(WIDTH, affine=True),
        nn.ELU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ELU(),
        nn.Conv2d(WIDTH, 1, 3, padding=1),
    ]
    return nn.Sequential(*layers).double()


def pictures(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy pictures of a replica and what they were without noise, alike on its ranks, without end."""
    for step in count():
        generator = torch.Generator().manual_seed(1000 * replica + step)
        coarse = torch.rand(BATCH, 1, 7, 6, dtype=torch.float64, generator=generator)
        clean = F.interpolate(coarse, SIZE, mode="bicubic", align_corners=True)
        yield clean + 0.2 * torch.randn(clean.shape, dtype=torch.float64, generator=generator), clean


def training(model: nn.Module, lessons: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[float]:
    """The training loop, without end: plain code, which knows nothing of ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for noisy, clean in lessons:
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        yield loss.item()


def mean_of_replicas(gradients: torch.Tensor, number: int) -> torch.futures.Future[torch.Tensor]:
    """A sum over the blocks of a picture, a mean over the replicas, when it is there."""
    work: Any = dist.all_reduce(gradients, async_op=True)
    total: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return total.then(lambda done: done.value()[0] / number)


def replicated(mesh: DeviceMesh, number: int) -> DistributedDataParallel:
    """The network: cut within a replica, and its gradients added over all ranks by torch."""
    blocks = mesh["blocks"]
    mine = MPIPartition(MPI.COMM_WORLD).create_partition_inclusive(blocks.mesh.tolist())
    P_x = mine.create_cartesian_topology_partition((1, 1, blocks.size(), 1))
    model = DistributedDataParallel(distribute(network(), P_x, reduction="none"))

    model.register_comm_hook(None, lambda _, bucket: mean_of_replicas(bucket.buffer(), number))
    return model


def run(chosen: Options) -> bool:
    """Train, and compare with one process; return whether it does the same."""
    dist.init_process_group("rma")
    shape = chosen.replicas, COMM.size // chosen.replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "blocks"))
    CONSOLE.print(f"{shape[0]} replicas, whose pictures of {SIZE[0]} x {SIZE[1]} are cut in {shape[1]}")
    model, replica = replicated(mesh, chosen.replicas), mesh["replicas"].get_local_rank()
    log = list(shown(measured(training(model, pictures(replica)), Machine.on()), chosen.steps))
    show_training(log, f"{-10 * torch.tensor(log[-1].loss).log10():.1f} dB", COMM)

    differences: dict[str, float] = {}
    announce_proof(log, COMM)
    if COMM.rank == 0:
        twin = network()
        everyone = zip(*map(pictures, range(chosen.replicas)), strict=True)
        batches = (tuple(map(torch.cat, zip(*each, strict=True))) for each in everyone)
        for _ in islice(training(twin, batches), chosen.steps):  # type: ignore[arg-type]
            pass
        pairs = zip(model.module.parameters(), twin.parameters(), strict=True)
        differences["weights"] = max(difference(ours.detach(), theirs.detach()) for ours, theirs in pairs)
    wait_asleep()
    holds = prove(COMM.bcast(differences), LIMIT, chosen.steps, COMM)
    model.module.distributed.close()
    dist.destroy_process_group()
    Machine.on().close()
    return holds


def main() -> int:
    """Exit status: 0 if all is well, 1 if the proof fails, 2 if the user made a mistake."""
    chosen = prepared(options, "ddp.py")
    if chosen is None:
        return 2
    return 0 if run(chosen) else 1


if __name__ == "__main__":
    leave(main())

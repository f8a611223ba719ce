"""The backend of torch.distributed against gloo, and all-reduce against MPI's; on 2 and 4 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import COMM, Row, compare
from benchmarks.training import BATCH, PIXELS, perceptron
from benchmarks.training_step import step_of
from distdl_rma import Machine

# Elements of float32, name, ratios to reach against gloo and MPI, calls per sample.
ALL_REDUCES = (
    (16, "64 B", 0.05, 4.0, 100),
    (1 << 10, "4 KiB", 0.1, 1.5, 100),
    (64 << 10, "256 KiB", 0.2, 0.6, 20),
    (1 << 20, "4 MiB", 0.3, 0.6, 4),
    (25 << 20, "100 MiB", 0.3, 0.4, 1),
)
MOVED = ((1 << 20, "4 MiB", 4), (25 << 20, "100 MiB", 1))
# Of the slower rows, which gloo makes long.
FEW = 11
WIDE, DEEP = 2048, 6  # together 100 MiB of parameters


def rows(_machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    dist.init_process_group("rma")
    gloo = dist.new_group(backend="gloo")
    yield from all_reduce_rows(gloo)
    yield floor_row()
    yield from movement_rows(gloo)
    yield from step_rows(gloo)
    dist.destroy_process_group()


def all_reduce_rows(gloo: dist.ProcessGroup) -> Iterator[Row]:
    """Sums in place."""
    for count, label, against_gloo, against_mpi, inner in ALL_REDUCES:
        x = torch.zeros(count)
        array = np.zeros(count, np.float32)
        baselines: list[tuple[str, Callable[[], object], float]] = [
            ("gloo", lambda x=x: dist.all_reduce(x, group=gloo), against_gloo),  # type: ignore[misc]
            ("MPI_Allreduce in place", lambda a=array: COMM.Allreduce(MPI.IN_PLACE, a), against_mpi),  # type: ignore[misc]
        ]
        for name, baseline, target in baselines:
            yield compare(
                f"torch's all_reduce, {label} float32",
                lambda x=x: dist.all_reduce(x),  # type: ignore[misc]
                baseline,
                against=f"{name}, {COMM.size} ranks",
                target=target,
                inner=inner,
                repetitions=FEW if count > 1 << 20 else 31,
            )


def floor_row() -> Row:
    """What torch does before it calls a group, and after."""
    nothing = Nothing(COMM.rank, COMM.size)
    x, array = torch.zeros(1 << 10), np.zeros(1 << 10, np.float32)
    return compare(
        "torch's all_reduce, 4 KiB float32, of a group that does nothing",
        lambda: dist.all_reduce(x, group=nothing),
        lambda: COMM.Allreduce(MPI.IN_PLACE, array),
        against=f"MPI_Allreduce in place, {COMM.size} ranks",
        inner=100,
        repetitions=31,
    )


class Over(dist.Work):
    """A call that is over."""

    def wait(self, *_: object) -> bool:
        """Return at once."""
        return True


_Base: Any = dist.ProcessGroup


class Nothing(_Base):  # type: ignore[misc]
    """A group in Python whose calls are over before they begin."""

    over = Over()

    def allreduce(self, *_: object) -> dist.Work:
        """Do nothing."""
        return self.over


def movement_rows(gloo: dist.ProcessGroup) -> Iterator[Row]:
    """Parts of all for all, sums of parts, and one rank's data for all."""
    for count, label, inner in MOVED:
        whole, part = torch.zeros(count), torch.zeros(count // COMM.size)
        calls: dict[str, Callable[[dist.ProcessGroup | None], object]] = {
            "all_gather": lambda g, w=whole, p=part: dist.all_gather_single(w, p, group=g),  # type: ignore[misc]
            "reduce_scatter": lambda g, w=whole, p=part: dist.reduce_scatter_single(p, w, group=g),  # type: ignore[misc]
            "broadcast": lambda g, w=whole: dist.broadcast(w, 0, group=g),  # type: ignore[misc]
        }
        for name, call in calls.items():
            yield compare(
                f"torch's {name}, {label} float32",
                lambda call=call: call(None),  # type: ignore[misc]
                lambda call=call: call(gloo),  # type: ignore[misc]
                against=f"gloo, {COMM.size} ranks",
                target=0.4,
                inner=inner,
                repetitions=FEW,
            )


def step_rows(gloo: dist.ProcessGroup) -> Iterator[Row]:
    """Training steps of networks whose parameters are copied, and kept in parts."""
    torch.manual_seed(1)
    alone = perceptron()
    x, labels = torch.randn(BATCH, PIXELS), torch.randint(10, (BATCH,))
    copied = [
        DistributedDataParallel(copy.deepcopy(alone), process_group=group, gradient_as_bucket_view=True)
        for group in (None, gloo, None)
    ]
    # What remains when communication takes no time.
    copied[2].register_comm_hook(None, lambda state, bucket: settled(bucket.buffer()))
    ours, theirs, silent = (step_of(model, x, labels, F.cross_entropy) for model in copied)
    yield steps("DDP step, 25 MiB of parameters", [ours, theirs])
    yield steps("DDP step, 25 MiB of parameters, nothing sent", [silent, theirs], None)
    del copied, ours, theirs, silent
    layers = [nn.Linear(WIDE, WIDE) for _ in range(DEEP)]
    sharded = [parts_of(copy.deepcopy(layers), group) for group in (dist.group.WORLD, gloo)]
    wide = torch.randn(32, WIDE)
    wanted = torch.randint(WIDE, (32,))
    both = [step_of(model, wide, wanted, F.cross_entropy) for model in sharded]
    yield steps("FSDP2 step, 100 MiB of parameters", both)


def parts_of(layers: list[nn.Linear], group: dist.ProcessGroup | None) -> nn.Module:
    """A network of which every rank of a group keeps a part."""
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh)
    return model


def settled(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What a hook of DDP returns that leaves every rank its own gradients."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def steps(what: str, both: list[Callable[[], object]], target: float | None = 0.8) -> Row:
    """A step on our group against the same on gloo's."""
    ours, theirs = both
    name = f"gloo, {COMM.size} ranks"
    return compare(what, ours, theirs, against=name, target=target, repetitions=FEW)

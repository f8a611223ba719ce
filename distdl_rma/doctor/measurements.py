"""Measurements between the ranks of a job, by the calls of the library; results go into a ``Job``.

Each measurement also compares what arrived: a network that is fast and wrong is the worst finding. Between
nodes one pair of ranks stands for all, since the examination should take seconds on any number of ranks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.doctor.facts import Compared, Job
from distdl_rma.errors import MismatchError
from distdl_rma.layers.model.compare import compare
from distdl_rma.layers.model.distribute import distribute
from distdl_rma.segments.machine import Machine

SMALL_NBYTES, LARGE_NBYTES = 8, 4 << 20
_ALLREDUCES = {"allreduce_4KiB_seconds": 4 << 10, "allreduce_4MiB_seconds": 4 << 20}
_WARM_UP, _REPEATS, _LARGE_REPEATS = 5, 50, 8
# A segment has room for the vectors of an allreduce several times.
_ROOM = 8


def measure(job: Job, timeout: float, take: Callable[[str, Callable[[], object]], bool]) -> None:
    """Make a machine and measure, up to the first step that fails; collective over all ranks.

    ``take`` is given the name of a step and a call, and returns whether the call has raised no error. Waits
    take ``timeout`` seconds at most.
    """
    machines: list[Machine] = []

    def make() -> None:
        machine = Machine(timeout=timeout)
        machines.append(machine)
        facts: Any = machine.describe()
        job.nodes, job.segment_bytes = [list(node) for node in facts["nodes"]], facts["segment bytes"]
        letters = {rank: way[0] for rank, way in facts["transport"].items()} | {machine.rank: "-"}
        job.transports[machine.rank] = "".join(letters[rank] for rank in machine.ranks)

    if not take("make a machine", make):
        return
    (machine,) = machines
    steps = [
        (f"put {name.replace('_', ' ')}", partial(puts, job, machine, name, *pair))
        for name, *pair in pairs(job.nodes)
    ]
    if machine.size > 1:
        steps.append(("allreduce", partial(allreduces, job, machine)))
    steps.append(("convolve a split image", partial(convolution, job, machine)))
    steps.append(("close the machine", partial(machine.close)))
    for step, call in steps:
        if not take(step, call):
            # The others need not wait for this rank.
            machine.fail(RuntimeError(f"could not {step}: {job.failures[-1].message}"))
            machine.close()
            return


def pairs(nodes: list[list[int]]) -> Iterator[tuple[str, int, int]]:
    """A pair of ranks on one node, and a pair on two nodes, where there are such pairs, with their names."""
    for node in [node for node in nodes if len(node) > 1][:1]:
        yield "on_node", node[0], node[1]
    if len(nodes) > 1:
        yield "between_nodes", nodes[0][0], nodes[1][0]


def puts(job: Job, machine: Machine, name: str, first: int, second: int) -> None:
    """Latency of a small put and bandwidth of a large one, on the first of two ranks; nothing elsewhere.

    Clocks of two ranks cannot be compared, so the first rank measures there and back. Small puts go both
    ways, and half of the time is the latency; a large one comes back as a small one, which hardly counts.
    """
    if machine.rank not in (first, second):
        return
    peer = second if machine.rank == first else first
    large = LARGE_NBYTES if _has_room(machine, LARGE_NBYTES) else SMALL_NBYTES
    buffer = machine.segments.get_segment_buffer(large, notifications=1, owner="doctor")
    remote = buffer.exchange((peer,), label=f"doctor ({name})")[peer]
    sent = np.resize(np.arange(256, dtype=np.uint8), large)

    def there_and_back(data: np.ndarray, back: np.ndarray) -> None:
        if machine.rank == first:
            remote.put_notify(data, 0)
            buffer.notify_wait(0)
        else:
            buffer.notify_wait(0)
            remote.put_notify(back, 0)

    small = sent[:SMALL_NBYTES]
    found = {f"put_latency_{name}_seconds": _seconds(lambda: there_and_back(small, small), _REPEATS) / 2}
    if large > SMALL_NBYTES:
        took = _seconds(lambda: there_and_back(sent, small), _LARGE_REPEATS)
        found[f"put_bandwidth_{name}_bytes_per_second"] = large / took
    arrived = sent if machine.rank == second else small
    if not np.array_equal(buffer.array[: arrived.size], arrived):
        raise MismatchError(
            f"a put of {arrived.size} bytes from rank {peer} to rank {machine.rank} has changed the data"
        )
    remote.flush()
    buffer.free()
    if machine.rank == first:
        job.measured |= found


def allreduces(job: Job, machine: Machine) -> None:
    """Seconds of allreduces over all ranks, of the sizes that the segment has room for; collective."""
    everyone = machine.group(name="doctor")
    for name, nbytes in _ALLREDUCES.items():
        if not _has_room(machine, nbytes):
            continue
        count = nbytes // 4
        total = everyone.allreduce(count, np.float32, name=f"doctor ({name})")
        ones = np.ones(count, np.float32)
        job.measured[name] = _seconds(partial(total, ones), _LARGE_REPEATS)
        if not (total.result == machine.size).all():
            raise MismatchError(f"an allreduce of {nbytes} bytes has a wrong result on rank {machine.rank}")
        total.close()
    everyone.close()


def convolution(job: Job, machine: Machine) -> None:
    """A convolution whose input is split over all ranks against torch's on the whole; collective.

    Rows are not a multiple of the ranks, so that blocks are uneven and halos differ. It uses what a model
    uses, from the segment to the gradients of parameters: if this is right, so is the installation.
    """
    torch.manual_seed(0)
    alone, split = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 4 * machine.size + 1, 16)
    with warnings.catch_warnings():
        # Findings say what ``distribute`` warns of.
        warnings.simplefilter("ignore")
        split = distribute(split, machine.partition((1, 1, machine.size, 1)))
        differences = compare(alone, split, x).differences
    names = {"input gradient": "gradient of the input", "output": "output"}
    job.compared += [
        Compared(names.get(each.what, f"{each.what} of the {each.name}"), each.error, each.scale, each.equal)
        for each in differences
        if each.what in ("gradient", *names)
    ]


def _has_room(machine: Machine, nbytes: int) -> bool:
    return machine.segments.stats().reserved >= _ROOM * nbytes


def _seconds(call: Callable[[], object], repeats: int) -> float:
    for _ in range(_WARM_UP):
        call()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return median(took)

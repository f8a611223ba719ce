"""What the ranks of a job do together, by the calls of the library, and whether it is right.

Results go into a ``Job``. Each step compares what arrived: a network that is wrong is the worst finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.doctor.facts import Compared, Job
from distdl_rma.errors import MismatchError
from distdl_rma.layers.model.compare import compare
from distdl_rma.layers.model.distribute import distribute
from distdl_rma.segments.machine import Machine

_NBYTES = 64 << 10


def measure(job: Job, timeout: float, take: Callable[[str, Callable[[], object]], bool]) -> None:
    """Make a machine and use it, up to the first step that fails; collective over all ranks.

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
    steps: dict[str, Callable[[], object]] = {
        f"put {'between nodes' if len(job.nodes) > 1 else 'on a node'}": partial(put, machine),
        "convolve a split image": partial(convolution, job, machine),
        "close the machine": machine.close,
    }
    # A rank alone has nobody to put to.
    for step, call in [*steps.items()][machine.size == 1 :]:
        if not take(step, call):
            # The others need not wait for this rank.
            machine.fail(RuntimeError(f"could not {step}: {job.failures[-1].message}"))
            machine.close()
            return


def put(machine: Machine) -> None:
    """A put with a notification to the next rank, on a node or another one; collective."""
    at, size = machine.ranks.index(machine.rank), machine.size
    before, after = (machine.ranks[(at + step) % size] for step in (-1, 1))
    buffer = machine.segments.get_segment_buffer(_NBYTES, notifications=1, owner="doctor")
    remote = buffer.exchange({before, after}, label="doctor (put)")[after]
    sent = np.resize(np.arange(256, dtype=np.uint8), _NBYTES)
    remote.put_notify(sent, 0)
    buffer.notify_wait(0)
    if not np.array_equal(buffer.array[:_NBYTES], sent):
        raise MismatchError(
            f"a put of {_NBYTES} bytes from rank {before} to rank {machine.rank} has changed the data"
        )
    remote.flush()
    buffer.free()


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

"""What the ranks of a job do together, by the calls of the library, and whether it is right.

Results go into a ``Job``. Each step compares what arrived: a network that is wrong is the worst finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from distdl_rma.doctor.facts import Compared, Job
from distdl_rma.layers.model.compare import compare
from distdl_rma.layers.model.distribute import distribute
from distdl_rma.segments.machine import Machine

# Of the image, of which a row has 4 KiB.
_COLUMNS = 171


def measure(job: Job, timeout: float, take: Callable[[str, Callable[[], object]], Any]) -> None:
    """Make a machine and use it, up to the first step that fails; collective over all ranks.

    ``take`` is given the name of a step and a call, and returns what the call does, True for None, or False
    if the call raises an error. Waits take ``timeout`` seconds at most.
    """
    machine = take("make a machine", partial(Machine, timeout=timeout))
    if not machine:
        return
    facts = machine.describe()
    job.nodes, job.segment_bytes = [list(node) for node in facts["nodes"]], facts["segment bytes"]
    letters = {rank: way[0] for rank, way in facts["transport"].items()} | {machine.rank: "-"}
    job.transports[machine.rank] = "".join(letters[rank] for rank in machine.ranks)
    where = "between nodes" if len(job.nodes) > 1 else "on a node"
    steps: dict[str, Callable[[], object]]
    steps = {f"convolve {where}": partial(convolution, job, machine), "close the machine": machine.close}
    for step, call in steps.items():
        if not take(step, call):
            # The others need not wait for this rank.
            machine.fail(RuntimeError(f"could not {step}: {job.failures[-1].message}"))
            machine.close()
            return


def convolution(job: Job, machine: Machine) -> None:
    """A convolution whose input is split over all ranks against torch's on the whole; collective.

    Rows are not a multiple of the ranks, so that blocks are uneven and halos differ. They are long: 4 KiB go
    to each neighbour. It uses what a model uses, from the segment to the gradients of parameters: if this is
    right, so is the installation.
    """
    torch.manual_seed(0)
    alone, split = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 4 * machine.size + 1, _COLUMNS)
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

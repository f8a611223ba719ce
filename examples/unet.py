"""Sharpen photographs with a U-Net on all ranks: ``mpiexec -n 4 python -m mpi4py examples/unet.py``.

The network of the interface document: photographs are split in rows, tensors of lower resolution as
``--layout`` says, in columns, blocks, channels or samples, on all ranks or on some. Layers come from global
parameters, an ordered machine and distributions; skip connections move data from one distribution to another
by ``Concat``. At the end one rank trains the same network alone, and the two must agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from mpi4py import MPI
from torch import nn

from demo_terminal import (
    COMM,
    CONSOLE,
    Step,
    announce_proof,
    difference,
    leave,
    measured,
    prepared,
    prove,
    show_training,
    shown,
    wait_asleep,
)
from distdl_rma import Distribution, GradientSync, Machine, gather_state_dict
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers import DistributedMSELoss, Repartition
from unet_network import Distributed, Layers, Sequential, UNet, layouts, levels
from unet_photographs import BATCH, LESSONS, TESTS, Photographs, draw, photographs, psnr
from unet_terminal import Options, options, show_levels

WIDTH = 8
SEED = 1
PICTURE = "unet.png"
PROOF_STEPS = 3
PROOF_LIMIT = 1e-4


# -------------------------------------------------------------------------- the same on one rank and on many


def network(layers: Layers, chosen: Options) -> UNet:
    """The network, with the same initial weights on any layers."""
    torch.manual_seed(SEED)
    return UNet(layers, levels(chosen.size, layouts(len(chosen.ranks))[chosen.layout]), WIDTH)


def training(model: nn.Module, criterion: nn.Module, lessons: Sequence[Photographs]) -> Iterator[float]:
    """The training loop, without end."""
    # Not Adam: it makes large steps of gradients that are nearly all rounding, which depends on the split.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for lesson in cycle(lessons):
        optimizer.zero_grad()
        loss = criterion(model(lesson.question), lesson.answer)
        loss.backward()
        optimizer.step()
        yield loss.item()


@dataclass(frozen=True)
class State:
    """Where the first steps of a training lead; weights are whole, the output on the machine's first rank."""

    steps: list[Step]
    weights: dict[str, torch.Tensor]
    output: torch.Tensor

    @classmethod
    def after(cls, steps: Iterator[Step], model: nn.Module, exam: Photographs, gather: nn.Module) -> State:
        """Take the steps, then look at the model."""
        taken = list(steps)
        with torch.no_grad():
            output = gather(model(exam.question))
        return cls(taken, gather_state_dict(model), output)


# ------------------------------------------------------------------------------------------------- many ranks


def run(
    chosen: Options, lessons: Sequence[Photographs], exam: Photographs, machine: Machine, team: MPI.Intracomm
) -> State:
    """Train and draw on the ranks of the machine; return the state after the first steps."""
    places = levels(chosen.size, layouts(machine.size)[chosen.layout])
    show_levels(machine, places)
    P_x = machine.distribute(places[0].distribution)
    P_root = machine.distribute(Distribution(1, 1, 1, 1))
    rows = Decomposition.balanced(P_x, exam.sharp.shape)
    own_lessons = [lesson.part(rows.slices()) for lesson in lessons]
    own_exam = exam.part(rows.slices())

    model = network(Distributed(machine, BATCH), chosen)
    criterion = DistributedMSELoss(P_x)
    gather = Repartition(P_x, P_root)
    # The one line that is new in a script: after backward, gradients are those of the whole photographs.
    GradientSync(model, machine)

    steps = shown(measured(training(model, criterion, own_lessons), machine), chosen.steps)
    start = State.after(islice(steps, PROOF_STEPS), model, own_exam, gather)
    log = [*start.steps, *steps]
    end = State.after(iter(()), model, own_exam, gather)

    sharpened = exam.sharpened(end.output) if team.rank == 0 else exam.blurred
    before, after = psnr(exam.blurred, exam.sharp), psnr(sharpened, exam.sharp)
    show_training(log, f"{before:.1f} dB out of focus, {after:.1f} dB sharpened", team)
    path = chosen.output / PICTURE
    if team.rank == 0:
        draw(exam, sharpened, sorted({rows.box(rank).start[2] for rank in P_x.ranks} - {0}), path)
    CONSOLE.print(f"picture: {path}")
    return start


# -------------------------------------------------------------------------------------------------- the proof


def proved(chosen: Options, team: MPI.Intracomm) -> bool:
    """Train on the ranks of the machine, then on its first one alone; return whether both agree."""
    lessons, (exam,) = (photographs(names, chosen.size) for names in (LESSONS, TESTS))
    with Machine(COMM, chosen.ranks) as machine:
        ours = run(chosen, lessons, exam, machine, team)
        announce_proof(ours.steps, team)
        twin = alone(chosen, lessons, exam, len(ours.steps), machine) if team.rank == 0 else None
        wait_asleep()
        return agree(ours, twin, team)


def alone(
    chosen: Options, lessons: Sequence[Photographs], exam: Photographs, steps: int, machine: Machine
) -> State:
    """The same training in this process alone, on whole photographs, with torch's layers and all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = network(Sequential(), chosen)
    losses = training(model, nn.MSELoss(), lessons)
    return State.after(islice(measured(losses, machine), steps), model, exam, nn.Identity())


def agree(ours: State, twin: State | None, team: MPI.Intracomm) -> bool:
    """Whether the ranks together come to the same losses, weights and output as the first one alone."""
    steps, weights = team.bcast((twin.steps, twin.weights) if twin else None)
    losses = ([torch.tensor(step.loss) for step in each] for each in (ours.steps, steps))
    differences = {
        "loss": max(map(difference, *losses)),
        "weights": max(difference(ours.weights[key], weights[key]) for key in weights),
        "output": difference(ours.output, twin.output) if twin else 0.0,
    }
    return prove(differences, PROOF_LIMIT, len(steps), team)


# ------------------------------------------------------------------------------------------------ the program


def main() -> int:
    """Exit status: 0 if all is well, 1 if the proof fails, 2 if the user made a mistake."""
    chosen = prepared(prepare, "unet.py")
    if chosen is None:
        return 2
    first = chosen.ranks[0]
    CONSOLE.quiet = COMM.rank != first
    holds = False
    if COMM.rank in chosen.ranks:
        # Only they make it, in the order of the machine.
        team = COMM.Create_group(COMM.group.Incl(chosen.ranks))
        holds = proved(chosen, team)
    else:
        wait_asleep()
    return 0 if COMM.bcast(holds, first) else 1


def prepare() -> Options:
    """All that can go wrong by a mistake of the user, before anything is computed."""
    chosen = options()
    if COMM.rank == 0:
        chosen.output.mkdir(parents=True, exist_ok=True)
    return chosen


if __name__ == "__main__":
    leave(main())

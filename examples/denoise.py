"""Denoise one photograph on all ranks: ``mpiexec -n 4 python -m mpi4py examples/denoise.py``.

Every rank holds a rectangle of the photograph and of all that the network makes of it. The network and the
training loop are those of one process: the layers and the loss come from ``distdl_rma``, and one line is
added, ``GradientSync``. At the end rank 0 trains the same network alone, and the two must agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from math import log10

import torch
from torch import nn

from demo_terminal import (
    COMM,
    CONSOLE,
    Mistake,
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
from denoise_image import draw_comparison, noise, read
from denoise_options import Options, options
from distdl_rma import GradientSync, Machine, MPIPartition, Partition
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss, Repartition

NOISE = 0.15
CHANNELS = 16
SEED = 1
PICTURE = "denoise.png"
PROOF_STEPS = 3
PROOF_LIMIT = 1e-4

LayerFactory = Callable[..., nn.Module]


# -------------------------------------------------------------------------- the same on one rank and on many


class ResidualBlock(nn.Module):
    """Two convolutions, added to what goes in."""

    def __init__(self, conv: LayerFactory, norm: LayerFactory, dilation: int) -> None:
        super().__init__()
        # No bias before a norm, which would take it off again.
        self.branch = nn.Sequential(
            conv(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            norm(CHANNELS, affine=True),
            nn.ELU(inplace=True),
            conv(CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation, bias=False),
            norm(CHANNELS, affine=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.elu(x + self.branch(x), inplace=True)


class Denoiser(nn.Module):
    """Six convolutions at full resolution, from torch's layers or any that take the same arguments."""

    def __init__(self, conv: LayerFactory, norm: LayerFactory) -> None:
        super().__init__()
        # The same seed gives the same initial weights, whatever the layers.
        torch.manual_seed(SEED)
        # ELU, not ReLU: where rounding alone puts a value on the other side of ReLU's kink, a gradient jumps,
        # and the proof would tell of such jumps in small pictures.
        self.layers = nn.Sequential(
            conv(3, CHANNELS, 3, padding=1),
            nn.ELU(inplace=True),
            ResidualBlock(conv, norm, dilation=1),
            ResidualBlock(conv, norm, dilation=2),
            conv(CHANNELS, 3, 3, padding=1),
        )

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        # In units of the noise all numbers are about 1, as the initial weights expect.
        denoised: torch.Tensor = NOISE * self.layers(noisy / NOISE)
        return denoised


@dataclass(frozen=True)
class Shard:
    """A rectangle of the photograph, or all of it."""

    clean: torch.Tensor
    box: Box
    width: int

    @classmethod
    def of(cls, image: torch.Tensor, box: Box) -> Shard:
        return cls(image[box.slices(Box.of_shape(image.shape))].clone(), box, image.shape[3])

    def noisy(self, draw: int) -> torch.Tensor:
        return self.clean + NOISE * noise(self.box, self.width, draw)


def training(model: nn.Module, criterion: nn.Module, shard: Shard) -> Iterator[float]:
    """The training loop, without end; noise number 0 is kept for the test."""
    # Not Adam: it divides every gradient by its own size. One that is nearly all rounding, which depends on
    # how sums are split, would move its weight as far as any other, and the proof would measure just that.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, nesterov=True)
    for step in count(1):
        noisy = shard.noisy(step)
        optimizer.zero_grad()
        loss = criterion(model(noisy), shard.clean)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.02)
        optimizer.step()
        yield loss.item()


# ------------------------------------------------------------------------------------------------- many ranks


def run(chosen: Options, image: torch.Tensor, P_world: Partition) -> bool:
    """Train, draw and prove; return whether the proof holds."""
    P_x = P_world.create_cartesian_topology_partition((1, 1, *chosen.grid))
    P_root = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
    layout = Decomposition.balanced(P_x, image.shape)
    shard = Shard.of(image, layout.box(COMM.rank))
    sizes = ["{2} x {3}".format(*tensor.shape) for tensor in (image, shard.clean)]
    CONSOLE.print(f"{chosen.image.name}, {sizes[0]} pixels, of which {sizes[1]} on rank 0 of {COMM.size}")

    model = Denoiser(partial(DistributedConv2d, P_x), partial(DistributedInstanceNorm2d, P_x))
    criterion = DistributedMSELoss(P_x)
    gather = Repartition(P_x, P_root)
    # The one line that is new in a script: after backward, gradients are those of the whole picture.
    GradientSync(model, P_x)

    machine = Machine.of(P_x)
    steps = shown(measured(training(model, criterion, shard), machine), chosen.steps)
    start = State.after(islice(steps, PROOF_STEPS), model, shard, gather)
    log = [*start.steps, *steps]

    with torch.no_grad():
        noisy = shard.noisy(0)
        denoised = model(noisy)
        before = psnr(criterion(noisy, shard.clean))
        after = psnr(criterion(denoised, shard.clean))
        wholes = {f"noisy, {before:.1f} dB": gather(noisy), f"denoised, {after:.1f} dB": gather(denoised)}
    show_training(log, f"{before:.1f} dB before, {after:.1f} dB after", COMM)
    if COMM.rank == 0:
        boxes = [layout.box(rank) for rank in P_x.ranks]
        draw_comparison({**wholes, "original": image}, boxes, chosen.output / PICTURE)
    CONSOLE.print(f"picture: {chosen.output / PICTURE}")
    return proved(start, image, machine)


def psnr(error: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, from the mean squared error of a picture in 0..1."""
    return -10 * log10(error.item())


# -------------------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True)
class State:
    """Where the first steps of a training lead; the output is whole on rank 0."""

    steps: list[Step]
    weights: list[torch.Tensor]
    output: torch.Tensor

    @classmethod
    def after(cls, steps: Iterator[Step], model: nn.Module, shard: Shard, gather: nn.Module) -> State:
        """Take the steps, then look at the model."""
        taken = list(steps)
        with torch.no_grad():
            output = gather(model(shard.noisy(0)))
        return cls(taken, [weight.detach().clone() for weight in model.parameters()], output)


def proved(state: State, image: torch.Tensor, machine: Machine) -> bool:
    """Whether rank 0 alone comes to the same weights, losses and picture as all ranks together."""
    announce_proof(state.steps, COMM)
    twin = sequential(image, len(state.steps), machine) if COMM.rank == 0 else None
    wait_asleep()
    steps, weights = COMM.bcast((twin.steps, twin.weights) if twin else None)
    losses = ([torch.tensor(step.loss) for step in each] for each in (state.steps, steps))
    differences = {
        "loss": max(map(difference, *losses)),
        "weights": max(map(difference, state.weights, weights)),
        "output picture": difference(state.output, twin.output) if twin else 0.0,
    }
    return prove(differences, PROOF_LIMIT, len(steps), COMM)


def sequential(image: torch.Tensor, steps: int, machine: Machine) -> State:
    """The same training in this process alone, on the whole photograph, with torch's layers and all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    whole = Shard.of(image, Box.of_shape(image.shape))
    model = Denoiser(nn.Conv2d, nn.InstanceNorm2d)
    losses = training(model, nn.MSELoss(), whole)
    return State.after(islice(measured(losses, machine), steps), model, whole, nn.Identity())


# ------------------------------------------------------------------------------------------------ the program


def main() -> int:
    """Exit status: 0 if all is well, 1 if the proof fails, 2 if the user made a mistake."""
    found = prepared(prepare, "denoise.py")
    if found is None:
        return 2
    chosen, image = found
    P_world = MPIPartition(COMM)
    holds = run(chosen, image, P_world)
    P_world.deactivate()
    return 0 if holds else 1


def prepare() -> tuple[Options, torch.Tensor]:
    """All that can go wrong by a mistake of the user, before anything is computed."""
    chosen = options()
    image = read(chosen.image)
    (rows, columns), (height, width) = chosen.grid, image.shape[2:]
    if height < rows or width < columns or height * width == 1:
        raise Mistake(f"{chosen.image} has {height} x {width} pixels, too few for {rows} x {columns} ranks")
    if COMM.rank == 0:
        chosen.output.mkdir(parents=True, exist_ok=True)
    return chosen, image


if __name__ == "__main__":
    leave(main())

"""Train a public model as it is on all ranks: ``mpiexec -n 4 python -m mpi4py examples/unmodified.py``.

The model is MONAI's BasicUNet, taken from the installed package. It learns to sharpen photographs.
``distribute`` has it compute on tensors that are split over the ranks; the training loop is that of one
process. At the end ``report`` tells what a step moves, and ``compare`` runs a step of the model alone: the
outputs of all modules, the loss and all gradients must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from monai.networks.nets.basic_unet import BasicUNet
from torch import nn
from torch.nn import functional as F  # noqa: N812

from demo_terminal import COMM, CONSOLE, leave, measured, prepared, show_training, shown
from distdl_rma import Machine, compare, distribute, report, shard
from unet_photographs import LESSONS, TESTS, Photographs, draw, photographs, psnr
from unmodified_terminal import Options, options, show_comparison, show_report

FEATURES = (16, 16, 32, 32, 64, 16)
SEED = 1
PICTURE, REPORT, COMPARISON = "unmodified.png", "report.txt", "comparison.txt"


def network() -> Any:
    """The model as its package has it, with the same initial weights on all ranks."""
    torch.manual_seed(SEED)
    return BasicUNet(spatial_dims=2, in_channels=3, out_channels=3, features=FEATURES, act="ELU")


def training(model: nn.Module, lessons: Sequence[Photographs]) -> Iterator[float]:
    """The training loop, without end: plain code, which knows nothing of ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for lesson in cycle(lessons):
        optimizer.zero_grad()
        loss = F.mse_loss(model(lesson.question), lesson.answer)
        loss.backward()
        optimizer.step()
        yield loss.item()


def run(chosen: Options) -> bool:
    """Train, draw, report and compare; return whether the model alone does the same."""
    lessons, (exam,) = (photographs(names, chosen.size) for names in (LESSONS, TESTS))
    model, grid = network(), "{}x{}".format(*chosen.grid)
    # The one line that is new in a script: photographs are cut, gradients are those of the whole.
    model = distribute(model, grid)
    photograph = shard(grid, exam.sharp)
    count = sum(weight.numel() for weight in model.parameters())
    sizes = ["{2} x {3}".format(*x.shape) for x in (photograph, photograph.to_local())]
    CONSOLE.print(f"BasicUNet of MONAI, {count:,} parameters")
    CONSOLE.print(f"photographs of {sizes[0]} pixels, of which {sizes[1]} on rank 0 of {COMM.size}")
    log = list(shown(measured(training(model, lessons), Machine.on()), chosen.steps))

    with torch.no_grad():
        answer = model(exam.question).full_tensor()
    sharpened = exam.sharpened(answer)
    before, after = psnr(exam.blurred, exam.sharp), psnr(sharpened, exam.sharp)
    show_training(log, f"{before:.1f} dB out of focus, {after:.1f} dB sharpened", COMM)

    with report(model) as step:
        F.mse_loss(model(exam.question), exam.answer).backward()
    show_report(step, chosen.output / REPORT)

    boxes = [photograph.decomposition.box(rank) for rank in range(COMM.size)]
    if COMM.rank == 0:
        rows, columns = (sorted({box.start[dim] for box in boxes} - {0}) for dim in (2, 3))
        draw(exam, sharpened, rows, chosen.output / PICTURE, columns)
    # Alone again; in double precision, as rounding alone may have a max pool take another element.
    model.distributed.close()
    alone = copy.deepcopy(model).double()
    twin = distribute(model.double(), grid)
    found = compare(alone, twin, exam.question.double(), exam.answer.double(), F.mse_loss)
    show_comparison(found, chosen.output / COMPARISON)
    CONSOLE.print(f"picture, and all rows of both tables: {chosen.output}")
    twin.distributed.close()
    Machine.on().close()
    return found.equal


def main() -> int:
    """Exit status: 0 if all is well, 1 if the comparison fails, 2 if the user made a mistake."""
    chosen = prepared(prepare, "unmodified.py")
    if chosen is None:
        return 2
    return 0 if run(chosen) else 1


def prepare() -> Options:
    """All that can go wrong by a mistake of the user, before anything is computed."""
    chosen = options()
    if COMM.rank == 0:
        chosen.output.mkdir(parents=True, exist_ok=True)
    return chosen


if __name__ == "__main__":
    leave(main())

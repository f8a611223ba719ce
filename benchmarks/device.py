"""Steps of a U-Net on a card that two ranks share: ``mpiexec -n 2 python -m mpi4py -m benchmarks.device``.

First the losses of the split network are compared with those of the whole one: times of a wrong result mean
nothing. Then steps are timed in turn, on all ranks at once, since ranks that share a card wait for each
other's kernels: the split network, and the same one on this rank's part of the image without any exchange
(*the bare half*), which no splitting can beat. Last the copies between the card and pinned memory.

The table goes into docs/devices.md. ``--device cpu`` tries the script on a machine without a card.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.measure import COMM, in_turn, timed
from benchmarks.training_step import step_of
from benchmarks.unet import UNet, image
from distdl_rma import distribute, report
from distdl_rma.layers.staging import from_host, to_host

WIDTH, STEPS, TOLERANCE = 32, 3, 1e-9
# Times for the step of the bare half, to reach.
GOAL = 1.15


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table on rank 0; collective."""
    parser = argparse.ArgumentParser(prog="benchmarks.device")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try the script")
    parser.add_argument("--side", type=int, default=512, help="of the image; ranks and poolings divide it")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--copied", type=int, default=32, help="MiB of the copies")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        if COMM.rank == 0:
            print(
                f"benchmarks.device: torch {torch.__version__} sees no GPU: run this on a machine with a card"
            )
        return
    rows = [
        *exactness(device, min(asked.side, 64)),
        *steps(device, asked.side, asked.repetitions),
        *copies(device, asked.copied << 20, asked.repetitions),
    ]
    if COMM.rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        lines = [f"| {name}, {COMM.size} ranks on it | measured |", "|---|---:|"]
        print("\n".join([*lines, *(f"| {what} | {value} |" for what, value in rows)]), flush=True)


def exactness(device: torch.device, side: int) -> Iterator[tuple[str, str]]:
    """The largest difference between losses of the split and of the whole network, which must be rounding."""
    alone = UNet(WIDTH // 4).double().to(device)
    split: Any = distribute(copy.deepcopy(alone), {"H": -1})
    losses: dict[str, list[float]] = {"alone": [], "split": []}
    for name, model in (("alone", alone), ("split", split)):
        x, target = (part.double().to(device) for part in image(side))
        step = step_of(model, x, target, _noted(losses[name]))
        for _ in range(STEPS):
            step()
    split.distributed.close()
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    if not worst <= TOLERANCE:
        sys.exit(f"benchmarks.device: losses differ by {worst:.1e}, wanted at most {TOLERANCE:.0e}: {losses}")
    yield f"losses of {STEPS} steps in double precision, largest difference", f"{worst:.1e}"


def steps(device: torch.device, side: int, repetitions: int) -> Iterator[tuple[str, str]]:
    """A step of the split network beside that of the bare half, and how long ranks waited for each other."""
    x, target = (part.to(device) for part in image(side))
    rows = side // COMM.size
    model: Any = distribute(UNet(WIDTH).to(device), {"H": -1})
    ours = step_of(model, x, target, F.mse_loss)
    bare = step_of(UNet(WIDTH).to(device), x[:, :, :rows], target[:, :, :rows], F.mse_loss)
    samples = in_turn({"split": _complete(ours, device), "bare": _complete(bare, device)}, repetitions)
    split, half = (1e3 * statistics.median(taken) for taken in samples.values())
    yield f"step of a U-Net of {side}x{side}, split", f"{split:.2f} ms"
    yield (
        f"step of its part without exchange, all ranks at once, goal {GOAL}",
        f"{half:.2f} ms, {split / half:.2f}",
    )
    with report(model) as step:
        _complete(ours, device)()
    yield "of which ranks waited for halos and sums, by report", f"{1e3 * step.waited:.2f} ms"
    yield "sent by a rank in a step", f"{step.nbytes / 1e6:.2f} MB in {step.messages} messages"
    model.distributed.close()


def copies(device: torch.device, nbytes: int, repetitions: int) -> Iterator[tuple[str, str]]:
    """Bandwidth of copies as a layer makes them, which all ranks make at once, beside one bare copy."""
    if device.type == "cpu":
        return
    there, words = (
        torch.ones(nbytes // 4, device=device),
        to_host([torch.ones(nbytes // 4, device=device)]).wait(),
    )
    host = torch.empty(nbytes // 4, pin_memory=device.type == "cuda")
    kinds: dict[str, Callable[[], object]] = {
        "bare copy down": lambda: host.copy_(there),
        "bare copy up": lambda: there.copy_(host),
        "copy down by a layer": lambda: to_host([there]).wait(),
        "copy up by a layer": lambda: from_host(words, nbytes // 4, there.dtype, device),
    }
    for name, act in kinds.items():
        taken = [timed(_complete(act, device)) for _ in range(repetitions)]
        yield f"{name}, {nbytes >> 20} MiB", f"{nbytes / statistics.median(taken) / 1e9:.1f} GB/s"


def _complete(act: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    # Kernels run behind the call that launches them.
    def called() -> None:
        act()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    return called


def _noted(losses: list[float]) -> Callable[..., torch.Tensor]:
    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = F.mse_loss(y, target)
        losses.append(found.item())
        return found

    return loss


if __name__ == "__main__":
    main()

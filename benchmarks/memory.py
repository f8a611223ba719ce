"""Peak memory of training steps of a model that nobody rewrote, against one process that has all of it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gains.networks import NETWORKS
from benchmarks.public_models import MODELS, training

STEPS = 3
# Of one process, how much is given back to the system in between depends on chance.
PROCESSES = 5


def peak_kib(step: Callable[[], object], steps: int = STEPS) -> int:
    """Most memory that the first steps have at once, above what is there before them."""
    # Has the kernel forget the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    for _ in range(steps):
        step()
    return status_kib("VmHWM") - before


def status_kib(name: str) -> int:
    """A number that the kernel keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def alone_mib(*arguments: str, processes: int = PROCESSES) -> tuple[float, float]:
    """Median of fresh processes, and half the distance between their quartiles.

    A child of this one would count pages of programs again that this one has. The arguments are those of
    :func:`step_alone`.
    """
    found = [int(said_alone(__name__, *arguments)) / 1024 for _ in range(processes)]
    low, middle, high = statistics.quantiles(found, n=4)
    return middle, (high - low) / 2


def said_alone(module: str, *arguments: str) -> str:
    """What a module prints in a fresh process, which knows nothing of MPI."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "MPI", "OMPI"))}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=known, check=True, capture_output=True, text=True).stdout


def step_alone(name: str, parts: str = "1") -> Callable[[], object]:
    """A step of a network whose gain is measured, or of a public model on so many a part of its image."""
    if name in NETWORKS:
        return NETWORKS[name].step()
    return training(MODELS[name].made(), MODELS[name].image(int(parts)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(peak_kib(step_alone(*sys.argv[1:])))

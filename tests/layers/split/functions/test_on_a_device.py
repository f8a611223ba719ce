"""Functions of split tensors on a device, on torch's own samples: exact, or refused in words."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mpi4py import MPI

from tests.fake_device import needs_fake_device
from tests.fuzz.samples import operations
from tests.layers.split import samples
from tests.layers.split.samples import on_device

pytestmark = [pytest.mark.mpi, needs_fake_device]
PARTS = 12
# Whose functions have such a test on the host.
FILES = (
    *("along", "embedding", "convolutions", "contractions", "windows", "norms", "pointwise", "losses"),
    *("reductions", "indexing", "rearranging", "compositions", "operands", "shapes"),
)
# Torch takes an argument of theirs from the host only, or pins memory.
EXCLUDED = {*samples.EXCLUDED, "tensor_split", "to"}


@pytest.mark.parametrize("part", range(PARTS))
def test_samples_of_torch_on_a_device(P_world, device, monkeypatch, part):
    monkeypatch.setattr(samples, "check", partial(on_device, samples.check, device))
    # What types have to do with has its test on the host.
    monkeypatch.setattr(samples, "MOST", 1)
    monkeypatch.setattr(samples, "ROUNDING", {torch.float64: 1e-8})
    files = {f".{file}" for file in FILES}
    homes = ((op, {home[home.rindex(".") :] for home in samples._homes(op)}) for op in operations())
    functions = [op for op, found in homes if found & files]
    for op in functions[part::PARTS]:
        if op.name not in EXCLUDED:
            some = MPI.COMM_WORLD.bcast([*samples._samples(op)] if MPI.COMM_WORLD.rank == 0 else None)
            for at, sample in enumerate(some):
                samples._check_sample(P_world, op, at, *sample)

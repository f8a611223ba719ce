"""Checkpoints in one process: what is missing is named, and MPI is not needed."""

import sys

import pytest
import torch
from torch import nn

from distdl_rma import CheckpointError, Checkpoints, load_checkpoint
from tests.run_mpi import completed

LOAD = """
import sys, torch
from torch import nn
from distdl_rma import load_checkpoint
model = nn.Linear(3, 2)
assert load_checkpoint(sys.argv[1], model) == 7
torch.manual_seed(3)
assert torch.equal(nn.Linear(3, 2).weight, model.weight)
assert not any(name.startswith("mpi4py") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_process_without_mpi_loads_and_the_safetensors_package_reads(tmp_path):
    torch.manual_seed(3)
    with Checkpoints(tmp_path / "run") as kept:
        kept.save({"model": nn.Linear(3, 2), "n": 1}, 7)
    said = completed([sys.executable, "-c", LOAD, str(tmp_path / "run")])
    assert said.returncode == 0, said.stderr
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Linear(3, 2)
    model.load_state_dict(safetensors.load_file(tmp_path / "run" / "step-7" / "data.safetensors"))
    assert load_checkpoint(tmp_path / "run" / "step-7", model) == 7
    with pytest.raises(CheckpointError, match="it has no 'ema', only"):
        load_checkpoint(tmp_path / "run", model, name="ema")


def test_a_folder_without_checkpoint_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=f"{folder} is no checkpoint, nor has it a complete one"):
            load_checkpoint(folder, nn.Linear(1, 1))

"""The backend is found by entry points: what the package names, and a torch from 2.14 on that looks there.

The pinned torch does not look. ``NEWER_TORCH`` names an interpreter of another environment, in which a newer
torch and this package are installed; without it that test is skipped.
"""

import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from distdl_rma import torch_backend
from tests.run_mpi import completed

NEWER = os.environ.get("NEWER_TORCH", "")
PROGRAM = """
import torch, torch.distributed as dist
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14), torch.__version__
dist.init_process_group("rma")
x = torch.ones(3) + dist.get_rank()
dist.all_reduce(x)
for backend in ("rma", "cpu:rma"):
    y, group = torch.ones(100_000, dtype=torch.bfloat16), dist.new_group(backend=backend)
    dist.all_reduce(y, group=group, async_op=True).get_future().wait()
from distdl_rma import distribute
model = distribute(torch.nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
model(torch.ones(1, 1, 6, 4)).mean().backward()
assert model.bias.grad.item() == 1
# In one piece: the ranks share a line.
print(f"{x.tolist()} {y[-1].item()} {dist.get_backend()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("group", "name", "what"),
    [
        ("torch.distributed.backends", "rma", torch_backend.register),
        ("torch.backends", "distdl_rma", torch_backend.register_with_torch),
    ],
)
def test_the_installed_package_names_what_makes_the_backend_known(group, name, what):
    found = {entry.load() for entry in entry_points(group=group, name=name)}
    assert found == {what}


@pytest.mark.skipif(not NEWER, reason="NEWER_TORCH names no interpreter with torch 2.14 or newer")
def test_a_newer_torch_finds_the_backend_without_an_import(tmp_path):
    launcher = Path(NEWER).parent / "mpiexec"
    command = [str(launcher), "-n", "2", NEWER, "-m", "mpi4py", "-c", PROGRAM]
    # The package is found where it is installed, not in this folder.
    done = completed(command, cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[3.0, 3.0, 3.0] 2.0 rma") == 2

"""What importing the package loads, and what it does not; each import in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import distdl_rma

# The process prints the top-level modules that the import has brought, one per line.
SCRIPT = """
import sys
before = set(sys.modules)
{prepare}
import {module}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}), sep="\\n")
"""
# A job of one process would do as well, but these tests need no MPI.
WITHOUT_MPI_START = "import mpi4py; mpi4py.rc.initialize = False"

PUBLIC = "layers", "segments", "geometry"


def run(script):
    """Run a script with warnings as errors; return what it prints."""
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded_by(module, prepare=""):
    """Top-level modules that importing a module brings."""
    return set(run(SCRIPT.format(module=module, prepare=prepare)).split())


@pytest.mark.parametrize("module", ["distdl_rma", "distdl_rma.errors"])
def test_the_package_alone_brings_only_the_standard_library(module):
    assert loaded_by(module) <= sys.stdlib_module_names | {"distdl_rma"}


def test_geometry_needs_only_the_standard_library():
    folder = Path(distdl_rma.__file__).parent / "geometry"
    modules = ", ".join(f"distdl_rma.geometry.{file.stem}" for file in folder.glob("[a-z]*.py"))
    assert loaded_by(modules) <= sys.stdlib_module_names | {"distdl_rma"}


@pytest.mark.parametrize("module", ["distdl_rma.segments", "distdl_rma.segments.machine"])
def test_segments_and_the_machine_work_without_torch(module):
    found = loaded_by(module, WITHOUT_MPI_START)
    assert {"numpy", "mpi4py"} <= found
    assert "torch" not in found


def test_names_are_loaded_when_they_are_first_used():
    script = """
import sys
import distdl_rma
assert "distdl_rma.geometry" not in sys.modules
distdl_rma.Partition((0, 1), (2,), 0)
from distdl_rma import PartitionError
assert not {"torch", "mpi4py", "numpy"} & set(sys.modules)
"""
    assert run(script) == ""


def test_importing_prints_nothing_and_starts_no_thread_and_no_process():
    script = """
import threading
import distdl_rma
import distdl_rma.geometry
assert threading.active_count() == 1
"""
    assert run(script) == ""


def test_every_public_name_can_be_loaded():
    script = f"""
{WITHOUT_MPI_START}
import distdl_rma
for name in distdl_rma.__all__:
    assert getattr(distdl_rma, name) is not None, name
"""
    assert run(script) == ""


@pytest.mark.parametrize("home", ["distdl_rma", *(f"distdl_rma.{name}" for name in PUBLIC)])
def test_dir_lists_the_public_names_and_no_others(home):
    module = import_module(home)
    listed = [name for name in dir(module) if name in module.__all__ or not name.startswith("__")]
    assert listed == sorted(module.__all__)


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError) as caught:
        distdl_rma.Communicator  # noqa: B018
    assert str(caught.value) == "module 'distdl_rma' has no attribute 'Communicator'"
    assert not hasattr(distdl_rma, "segment_size")


def test_the_package_is_no_backend_of_opt_einsum_where_nobody_imported_that():
    assert "einsum" not in dir(distdl_rma)
    if "opt_einsum" not in sys.modules:
        assert not hasattr(distdl_rma, "tensordot")


@pytest.mark.parametrize("start", [WITHOUT_MPI_START, "from mpi4py import MPI; MPI.Finalize()"])
def test_virtual_ranks_need_no_mpi(start):
    script = f"""
{start}
import numpy as np
from distdl_rma import Machine, rehearse

def play(comm):
    with Machine(comm, segment_size="1MiB", transport=["auto", "remote"][comm.size == 3]) as machine:
        buffer = machine.segments.get_segment_buffer(4096, 1)
        peer = (machine.rank + 1) % comm.size
        buffer.exchange([r for r in machine.ranks if r != machine.rank])[peer].put(np.ones(4096, np.uint8))
        machine.group().barrier()
        return machine.describe()["thread level"]

print(rehearse(2, play), rehearse(3, play))
import torch
from distdl_rma import plan_prediction
plan = plan_prediction(torch.nn.Conv2d(1, 1, 3), np.zeros((16, 16), np.float32))
"""
    assert run(script)

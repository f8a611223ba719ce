"""The command ``distdl_rma predict``."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distdl_rma import Checkpoints, open_array
from distdl_rma.__main__ import main
from tests.jobs.out_of_core.nets import UNet, seeded, whole
from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow

MODULE = """
import torch
from tests.jobs.out_of_core.nets import UNet

def make():
    torch.manual_seed(0)
    return UNet(2, "instance")

def classes(y):
    return y.argmax(1).to(torch.uint8)

def other_weights():
    torch.manual_seed(1)
    return UNet(2, "instance")

def raises():
    return {}["weights"]

def other():
    return {}

def ends():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise KeyboardInterrupt
    MPI.COMM_WORLD.Barrier()

number = 3
"""


def command(folder, *arguments, ranks=0, program=("-m", "distdl_rma", "predict")):
    """How the command ended in a folder with the module, of one process without a launcher or of ranks."""
    (folder / "mine.py").write_text(MODULE)
    job = [*(mpiexec(ranks) if ranks else []), sys.executable, *program, *arguments]
    return completed(job, cwd=folder)


def saved_input(folder, rows):
    """The input, and what the model makes of it."""
    x = np.random.default_rng(0).normal(size=(rows, 40)).astype(np.float32)
    np.save(folder / "x.npy", x)
    return whole(seeded(lambda: UNet(2, "instance")), torch.from_numpy(x)[None, None])[0]


def test_a_file_becomes_a_file_and_the_plan_is_shown(tmp_path):
    want = saved_input(tmp_path, 70).argmax(0)
    options = "--in", "x.npy", "--post", "mine:classes", "--grid", "3x1", "--memory", "300MiB"
    done = command(tmp_path, "mine:make", *options, "--out", "y.zarr")
    assert done.returncode == 0, done.stderr
    assert "slabs     3 along H" in done.stderr and "predict" in done.stderr and not done.stdout
    found = np.asarray(open_array(tmp_path / "y.zarr")[:, :])
    assert np.array_equal(found, want.numpy().astype(np.uint8))
    planned = command(tmp_path, "mine:make", *options)
    assert planned.returncode == 0 and "passes    11: 10 functions" in planned.stdout
    refused = command(tmp_path, "mine:make", *options, "--out", "y.zarr", "--quiet")
    assert refused.returncode == 1 and "y.zarr: is there already" in refused.stderr


# Arguments behind the input, and what the only line of the error says.
REFUSED = [
    (["mine"], "is not of the form module:function"),
    (["absent:make"], "there is no module 'absent'"),
    (["mine:absent"], "module 'mine' has no 'absent'"),
    (["mine:number"], "mine:number is a 'int'; name a model, or a function"),
    (["mine:other"], "mine:other returns a 'dict'; it returns the model"),
    (["mine:make", "--in", "y.npy"], "y.npy: not found"),
    (["mine:make", "--in", "colours.npy"], r"do not take (batch, channels, *spatial) = (1, 3, 40, 30)"),
    (["mine:make", "--post", "mine:number"], "mine:number is a 'int', and no function"),
    (["mine:make", "--memory", "much"], "the memory"),
    (["mine:make", "--grid", "3x0"], "a grid has the numbers of blocks"),
    (["mine:make", "--scratch", "nowhere"], "is no folder"),
    (["mine:make", "--out", "y.png"], "y.png: writes .npy, .h5, .hdf5, .zarr"),
    (["mine:make", "--out", "absent/y.npy"], "absent: not found"),
    ([], "name a model, as module:function, or a bundle"),
    (["mine:make", "--bundle", "b"], "name a model, as module:function, or a bundle"),
    (["--nnunet", "n", "--bundle", "b"], "name a model, as module:function, or a bundle"),
    (["mine:make", "--fold", "0"], "--fold is of --nnunet, --raw of --nnunet and --bundle"),
    (["mine:make", "--raw"], "--fold is of --nnunet, --raw of --nnunet and --bundle"),
    (["--nnunet", "n"], "n is no folder that nnU-Net has trained: plans.json"),
    (["--bundle", "b"], "b is no bundle of MONAI: it has none of"),
    (["mine:make", "--checkpoint", "absent.pt"], "absent.pt: not found"),
    (["mine:make", "--checkpoint", "runs"], "nor has it a complete one; there are some in best"),
    (["mine:make", "--checkpoint", "runs/best"], "is of another model"),
]


def test_arguments_that_do_not_fit_are_one_line_of_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, channels in (("x", 1), ("colours", 3)):
        np.save(tmp_path / f"{name}.npy", np.zeros((channels, 40, 30), np.float32))
    (tmp_path / "runs").mkdir()
    with Checkpoints(tmp_path / "runs/best") as checkpoints:
        checkpoints.save({"model": UNet(3, "instance")}, 1)
    for arguments, text in REFUSED:
        status, said = main(["predict", "--in", "x.npy", *arguments]), capsys.readouterr().err
        assert (status, said.count("\n")) == (1, 1) and text in said, (arguments, said)
    del sys.modules["mine"]


def test_ranks_predict_together_and_a_function_that_raises_ends_them_all(tmp_path):
    done = command(tmp_path, "mine:raises", "--in", "x.npy", ranks=2)
    assert done.returncode == 1
    assert """return {}["weights"]""" in done.stderr
    assert done.stderr.count("ArgumentError: predict: mine:raises raises KeyError: 'weights'\n") == 1
    want, options = saved_input(tmp_path, 40), ["mine:make", "--in", "x.npy", "--grid", "3x1"]
    program = ("-m", "mpi4py", "-m", "distdl_rma", "predict")
    torch.save({"state_dict": seeded(lambda: UNet(2, "instance")).state_dict()}, tmp_path / "w.pt")
    options += ["--checkpoint", "w.pt"]
    done = command(tmp_path, *options, "--checkpoint", "w.pth", ranks=2, program=program)
    assert done.returncode == 1 and done.stderr.count("DataError: w.pth: not found") == 1
    options[0] = "mine:other_weights"
    for others, lines in (([], 8), (["--out", "y.npy", "--quiet"], 0)):
        done = command(tmp_path, *options, *others, ranks=2, program=program)
        assert done.returncode == 0 and done.stdout.count("\n") == lines and not done.stderr
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), want, rtol=1e-4, atol=1e-5)


def test_the_console_script_ends_the_whole_job_where_one_rank_ends(tmp_path):
    script = Path(sys.executable).with_name("distdl_rma")
    if not script.exists():
        pytest.skip("the package is not installed")
    (tmp_path / "mine.py").write_text(MODULE)
    saved_input(tmp_path, 40)
    done = completed([*mpiexec(2), str(script), "predict", "mine:ends", "--in", "x.npy"], 60, tmp_path)
    assert done.returncode != 0
    done = completed([str(script), "predict", "mine:make", "--in", "x.npy"], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("source    (40, 40), 1 sample")

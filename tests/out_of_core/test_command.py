"""The command ``python -m distdl_rma predict``."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distdl_rma import open_array
from tests.out_of_core.nets import UNet, whole

MODULE = """
import torch
from tests.out_of_core.nets import UNet

def make():
    torch.manual_seed(0)
    return UNet(2, "instance")

def classes(y):
    return y.argmax(1).to(torch.uint8)
"""


def command(folder, *arguments):
    (folder / "mine.py").write_text(MODULE)

    root = os.environ.get("PYTHONPATH", "") + os.pathsep + str(Path.cwd())
    return subprocess.run(
        [sys.executable, "-m", "distdl_rma", "predict", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_file_becomes_a_file_and_the_plan_is_shown(tmp_path):
    x = np.random.default_rng(0).normal(size=(70, 40)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    options = "--in", "x.npy", "--post", "mine:classes", "--grid", "3x1", "--memory", "300MiB"
    done = command(tmp_path, "mine:make", *options, "--out", "y.zarr")
    assert done.returncode == 0, done.stderr
    assert "slabs     3 along H" in done.stderr and "predict" in done.stderr and not done.stdout
    torch.manual_seed(0)
    want = whole(UNet(2, "instance"), torch.from_numpy(x)[None, None]).argmax(1)[0]
    found = np.asarray(open_array(tmp_path / "y.zarr")[:, :])
    assert np.array_equal(found, want.numpy().astype(np.uint8))
    planned = command(tmp_path, "mine:make", *options)
    assert planned.returncode == 0 and "passes    11: 10 functions" in planned.stdout
    refused = command(tmp_path, "mine:make", *options, "--out", "y.zarr", "--quiet")
    assert refused.returncode == 1 and "y.zarr: is there already" in refused.stderr


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("mine", "is not of the form module:function"),
        ("absent:make", "there is no module 'absent'"),
        ("mine:absent", "module 'mine' has no 'absent'"),
    ],
)
def test_a_model_that_is_not_there_is_an_error(model, text, tmp_path):
    done = command(tmp_path, model, "--in", "x.npy")
    assert done.returncode == 1 and text in done.stderr

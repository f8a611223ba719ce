"""The recipe as a user runs it, by itself, by Lightning and by a batch script; MPI jobs of their own."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import skimage.io
import yaml

from tests.examples.launching import EXAMPLES, launch
from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow

# As the recipe, of a smaller picture; what rank 1 does at the beginning of an epoch.
SMALL = """
import os, signal, sys
sys.path[:0] = [{root!r}, {examples!r}]
from tests.layers.model.public import torchvision_models
torchvision_models()  # which torchmetrics imports
import {module} as example
recipe = sys.modules["recipe"]
recipe.CROP, recipe.PREDICT = 32, "rocket.jpg"
def train(*arguments, train=recipe.train):
    folder = recipe.Path(sys.argv[-1])
    if example.Machine.on().rank == 1:
        {at_epoch}
    return train(*arguments)
recipe.train = train
example.main()
"""


def script_of(module, folder, at_epoch="pass"):
    script = folder / f"small_{module}.py"
    names = {"root": str(EXAMPLES.parent), "examples": str(EXAMPLES), "module": module, "at_epoch": at_epoch}
    script.write_text(SMALL.format(**names))
    return script


def metrics(folder):
    """Epoch, loss and metric of each line."""
    file = folder / "metrics.csv"
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return [tuple(map(float, line.split(","))) for line in lines]


def test_a_killed_recipe_goes_on_with_other_ranks_and_the_same_losses_and_predicts(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ["--epochs", "4", "--crops", "4", "--output"]
    due = "folder.name == 'killed' and (folder / 'last/step-2').exists()"
    kill = f"if {due}: os.kill(os.getpid(), signal.SIGKILL)"
    script = script_of("recipe", tmp_path, kill)
    code, stdout, stderr = launch(3, script, "--grid", "1x3", *options, whole)
    assert code == 0, stderr
    told = re.compile(r"prediction: 20\.\d\d dB with noise, \d+\.\d\d without")
    assert any(map(told.fullmatch, stdout))
    assert skimage.io.imread(whole / "prediction.png").shape == (427, 3 * 640, 3)
    code, *_ = launch(2, script, *options, killed)
    assert code != 0 and len(metrics(killed)) == 2
    code, stdout, stderr = launch(1, script, *options, killed)
    assert code == 0, stderr
    assert next(line for line in stdout if line.startswith("epoch")).split()[1] == "3"
    for one, other in zip(metrics(whole), metrics(killed), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_batch_script_starts_the_job_again_only_if_it_was_told_to_stop(tmp_path):
    # In place of Slurm: two ranks by mpiexec, one of which gets the signal in the first epoch.
    stop = "if not (folder / 'last/step-1').exists(): os.kill(os.getpid(), signal.SIGUSR1)"
    tools = {
        "srun": f'shift 2; exec {shlex.join(mpiexec(2))} "$@"',
        "scontrol": f'echo "$@" >> {tmp_path / "told"}',
    }
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    script = script_of("recipe", tmp_path, stop)
    settings = {"PATH": path, "SCRIPT": str(script), "OUTPUT": str(tmp_path / "out"), "SLURM_JOB_ID": "17"}
    command = ["bash", str(EXAMPLES / "cluster" / "slurm.sbatch"), "--epochs", "2", "--crops", "2"]
    first, second = (completed(command, **settings) for _ in range(2))
    assert (first.returncode, second.returncode) == (3, 0), first.stderr + second.stderr
    assert (tmp_path / "told").read_text() == "requeue 17\n"
    assert [epoch for epoch, *_ in metrics(tmp_path / "out")] == [1, 2]


def test_lightning_trains_the_same_network_and_goes_on_with_other_ranks(tmp_path):
    script, folder = script_of("recipe_lightning", tmp_path), tmp_path / "out"
    for ranks, epochs in ((2, 1), (3, 2)):
        code, _, stderr = launch(ranks, script, "--epochs", epochs, "--crops", "2", "--output", folder)
        assert code == 0, stderr
    logs = [(folder / "logs" / f"version_{run}" / "metrics.csv").read_text() for run in (0, 1)]
    assert [re.findall(r"^(\d),", text, re.MULTILINE) for text in logs] == [["0", "0"], ["1", "1"]]
    assert (folder / "best.ckpt").exists()


def test_files_for_containers_and_conda_name_what_the_package_asks_for():
    cluster = EXAMPLES / "cluster"
    *needed, last = yaml.safe_load((cluster / "environment.yml").read_text())["dependencies"]
    assert {re.split("[=>]", one)[0] for one in needed} >= {"python", "mpi4py", "numpy"}
    assert last == {"pip": ["-e ../.."]}
    docker = (cluster / "Dockerfile").read_text()
    words = {line.split()[0] for line in docker.replace("\\\n", " ").splitlines() if line and line[0] != "#"}
    assert words == {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
    sections = re.findall(r"^%(\w+)$", (cluster / "apptainer.def").read_text(), re.MULTILINE)
    assert sections == ["files", "post", "environment", "test"]

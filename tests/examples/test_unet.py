"""The sharpening demo, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import skimage.io

from distdl_rma import Partition
from examples.unet_network import layouts
from tests.examples.launching import (
    assert_all_ranks_end_with,
    launch,
    launch_with_mistakes,
    launcher_is_hydra,
)

DEMO = Path(__file__).resolve().parents[2] / "examples" / "unet.py"
SMALL = ("--size", "33x49", "--steps", 4)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, []),
        (3, ["--layout", "samples"]),
        (4, ["--layout", "channels", "--ranks", "2,0,3,1"]),
        (4, ["--layout", "columns", "--ranks", "3,1,2"]),
    ],
    ids=["1", "3 samples", "4 channels, permuted", "3 of 4 columns"],
)
def test_ranks_together_agree_with_one_alone(ranks, arguments, tmp_path):
    folder = tmp_path / "not" / "there yet"
    outcome = launch(ranks, DEMO, *SMALL, "--output", folder, *arguments)
    assert_all_ranks_end_with(0, ranks, outcome)
    _, stdout, stderr = outcome
    assert not stderr
    assert sum(line.startswith("step ") for line in stdout) == 4
    assert "proof holds: the limit is 1e-04" in stdout
    assert f"picture: {folder / 'unet.png'}" in stdout
    assert skimage.io.imread(folder / "unet.png").size


def test_failed_proof_ends_all_ranks_with_1(tmp_path):
    script = tmp_path / "impossible.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(DEMO.parent)!r})\n"
        "import unet\nunet.PROOF_LIMIT = -1.0\nunet.leave(unet.main())\n"
    )
    outcome = launch(3, script, *SMALL, "--ranks", "2,0", "--output", tmp_path)
    assert_all_ranks_end_with(1, 3, outcome)
    assert "proof FAILS: the limit is -1e+00" in outcome[1]


MISTAKES = {
    "--layout diagonal": "invalid choice: 'diagonal'",
    "--ranks 0,2": "--ranks names rank 2, but 2 are running, from 0 on",
    "--ranks 1,1": "--ranks names a rank twice: 1,1",
    "--ranks all": "ranks are numbers with commas between them, not 'all'",
    "--size 15x40": "both at least 16, not '15x40'",
    "--steps 0": "at least 1 step is needed, not '0'",
}


def test_mistake_is_told_once_and_ends_all_ranks():
    outcome = launch(2, DEMO, "--ranks", "1,1")
    assert_all_ranks_end_with(2, 2, outcome)
    told = [line for line in outcome[2] if line.startswith("unet.py: ")]
    assert len(told) == 1
    assert not launcher_is_hydra() or outcome[2] == told


def test_every_mistake_is_told_once_and_before_anything_is_computed(tmp_path):
    outcome, told = launch_with_mistakes(2, DEMO, [case.split() for case in MISTAKES], tmp_path)
    assert_all_ranks_end_with(2, 2, outcome)
    assert len(told) == len(MISTAKES), outcome[2]
    for lines, message in zip(told, MISTAKES.values(), strict=True):
        told_here = [line for line in lines if line.startswith("unet.py: ")]
        assert len(told_here) == 1 and message in told_here[0], lines


@pytest.mark.parametrize("ranks", range(1, 17))
def test_layouts_fit_any_number_of_ranks(ranks):
    machine = Partition(tuple(range(ranks)), (ranks,), 0)
    for name, distributions in layouts(ranks).items():
        for distribution in distributions:
            distribution.check(ranks, who=name)
            assert len(set(distribution.active_ranks(machine))) == distribution.size
        # The photographs are on all of them.
        assert distributions[0].active_ranks(machine) == machine.ranks

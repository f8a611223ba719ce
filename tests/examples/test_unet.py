"""The sharpening demo, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

import pytest
import skimage.io

from distdl_rma import Partition
from examples.unet_network import layouts
from tests.examples.launching import EXAMPLES, Case, assert_mistakes_are_told_once, ended, launch_in_turn

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "unet.py"
STEPS = 2
SMALL = ("--size", "33x49", "--steps", STEPS)


def assert_proved(proved, runs, stdout, *folders):
    assert sum(line.startswith("step ") for line in stdout) == STEPS * runs
    assert stdout.count("proof holds: the limit is 1e-04") == proved
    for folder in folders:
        assert f"picture: {folder / 'unet.png'}" in stdout
        assert skimage.io.imread(folder / "unet.png").size


def test_one_rank_is_one_process(tmp_path):
    folder = tmp_path / "not" / "there yet"
    stdout, stderr = ended(0, 1, DEMO, *SMALL, "--output", folder)
    assert not stderr
    assert_proved(1, 1, stdout, folder)


LAYOUTS = {
    "channels, permuted": ["--layout", "channels", "--ranks", "2,0,3,1"],
    "columns of 3": ["--layout", "columns", "--ranks", "3,1,2"],
    "samples": ["--layout", "samples"],
}
MISTAKES = {
    "--layout diagonal": "invalid choice: 'diagonal'",
    "--ranks 0,4": "--ranks names rank 4, but 4 are running",
    "--ranks 1,1": "--ranks names a rank twice: 1,1",
    "--ranks all": "ranks are numbers with commas between them, not 'all'",
    "--size 15x40": "both at least 16, not '15x40'",
    "--steps 0": "at least 1 step is needed, not '0'",
}


# One job of four ranks on two cores trains the network in each layout, twice.
def test_four_ranks_agree_with_one_in_any_layout_and_tell_a_failed_proof_and_every_mistake_once(tmp_path):
    run = [*SMALL, "--output"]
    proofs = [Case([*run, tmp_path / name, *chosen]) for name, chosen in LAYOUTS.items()]
    mistakes = [Case(arguments.split(), 2) for arguments in MISTAKES]
    fails = Case([*run, tmp_path, "--ranks", "2,0"], 1, "demo.PROOF_LIMIT = -1.0")
    (_, stdout, _), told = launch_in_turn(4, DEMO, [*proofs, *mistakes, fails], tmp_path)
    assert not any(told[:3]) and not told[-1]
    assert_mistakes_are_told_once(DEMO, MISTAKES.values(), told[3:-1])
    assert stdout.count("proof FAILS: the limit is -1e+00") == 1
    assert_proved(3, 4, stdout, *(tmp_path / name for name in LAYOUTS))


@pytest.mark.parametrize("ranks", range(1, 17))
def test_layouts_fit_any_number_of_ranks(ranks):
    machine = Partition(tuple(range(ranks)), (ranks,), 0)
    for name, distributions in layouts(ranks).items():
        for distribution in distributions:
            distribution.check(ranks, who=name)
            assert len(set(distribution.active_ranks(machine))) == distribution.size
        # The photographs are on all of them.
        assert distributions[0].active_ranks(machine) == machine.ranks

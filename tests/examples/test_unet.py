"""The sharpening demo, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import skimage.io

from distdl_rma import Partition
from examples.unet_network import layouts
from tests.examples.launching import (
    Case,
    assert_all_ranks_end_with,
    assert_mistakes_are_told_once,
    launch,
    launch_in_turn,
)

DEMO = Path(__file__).resolve().parents[2] / "examples" / "unet.py"
SMALL = ("--size", "33x49", "--steps", 4)


def assert_proved(runs, stdout, *folders):
    assert sum(line.startswith("step ") for line in stdout) == 4 * runs
    assert stdout.count("proof holds: the limit is 1e-04") == runs
    for folder in folders:
        assert f"picture: {folder / 'unet.png'}" in stdout
        assert skimage.io.imread(folder / "unet.png").size


def test_one_rank_is_one_process(tmp_path):
    folder = tmp_path / "not" / "there yet"
    outcome = launch(1, DEMO, *SMALL, "--output", folder)
    assert_all_ranks_end_with(0, 1, outcome)
    _, stdout, stderr = outcome
    assert not stderr
    assert_proved(1, stdout, folder)


LAYOUTS = {
    "channels, permuted": ["--layout", "channels", "--ranks", "2,0,3,1"],
    "columns of 3": ["--layout", "columns", "--ranks", "3,1,2"],
}


def test_four_ranks_agree_with_one_alone_in_another_order_and_without_one_of_them(tmp_path):
    cases = [Case([*SMALL, "--output", tmp_path / name, *chosen]) for name, chosen in LAYOUTS.items()]
    (_, stdout, _), told = launch_in_turn(4, DEMO, cases, tmp_path)
    assert not any(told)
    assert_proved(2, stdout, *(tmp_path / name for name in LAYOUTS))


MISTAKES = {
    "--layout diagonal": "invalid choice: 'diagonal'",
    "--ranks 0,3": "--ranks names rank 3, but 3 are running",
    "--ranks 1,1": "--ranks names a rank twice: 1,1",
    "--ranks all": "ranks are numbers with commas between them, not 'all'",
    "--size 15x40": "both at least 16, not '15x40'",
    "--steps 0": "at least 1 step is needed, not '0'",
}


def test_three_ranks_agree_and_tell_a_failed_proof_and_every_mistake_once(tmp_path):
    run = [*SMALL, "--output", tmp_path]
    proofs = [
        Case([*run, "--layout", "samples"]),
        Case([*run, "--ranks", "2,0"], 1, "demo.PROOF_LIMIT = -1.0"),
    ]
    mistakes = [Case(arguments.split(), 2) for arguments in MISTAKES]
    (_, stdout, _), told = launch_in_turn(3, DEMO, [*proofs, *mistakes], tmp_path)
    assert not told[0] and not told[1]
    assert_mistakes_are_told_once(DEMO, MISTAKES.values(), told[2:])
    assert {"proof holds: the limit is 1e-04", "proof FAILS: the limit is -1e+00"} <= set(stdout)


@pytest.mark.parametrize("ranks", range(1, 17))
def test_layouts_fit_any_number_of_ranks(ranks):
    machine = Partition(tuple(range(ranks)), (ranks,), 0)
    for name, distributions in layouts(ranks).items():
        for distribution in distributions:
            distribution.check(ranks, who=name)
            assert len(set(distribution.active_ranks(machine))) == distribution.size
        # The photographs are on all of them.
        assert distributions[0].active_ranks(machine) == machine.ranks

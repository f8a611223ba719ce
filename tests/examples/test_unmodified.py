"""The demo of a public model as it is, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

import pytest
import skimage.io

from tests.examples.launching import EXAMPLES, Case, assert_mistakes_are_told_once, ended, launch_in_turn

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "unmodified.py"
SMALL = ("--size", "33x48")


# As some error of the library would.
WRONG = """
def wrong(model, grid, distribute=demo.distribute):
    if model.final_conv.bias.dtype == torch.float64:
        model.final_conv.register_forward_hook(lambda module, args, y: y + 1e-3)
    return distribute(model, grid)
demo.distribute = wrong
"""
MISTAKES = {
    "--grid 2x2": "--grid 2x2 needs 4 ranks, but 3 are running",
    "--size 31x40": "BasicUNet needs a height and a width of 32 or more, not 31x40",
    "--steps 0": "at least 1 step is needed, not '0'",
}


def test_three_ranks_are_the_model_alone_tell_every_mistake_once_and_end_with_1_after_a_difference(tmp_path):
    folder = tmp_path / "not" / "there yet"
    run = Case([*SMALL, "--steps", 2, "--grid", "1x3", "--output", folder])
    mistakes = [Case(arguments.split(), 2) for arguments in MISTAKES]
    wrong = Case([*SMALL, "--steps", 1, "--output", tmp_path], 1, WRONG)
    (_, stdout, _), told = launch_in_turn(3, DEMO, [run, *mistakes, wrong], tmp_path)
    assert not told[0] and not told[-1]
    assert_mistakes_are_told_once(DEMO, MISTAKES.values(), told[1:-1])
    assert sum(line.startswith("step ") for line in stdout) == 2 + 1
    alike, different = (line for line in stdout if line.startswith("first difference: "))
    assert alike == "first difference: none"
    assert different.startswith("first difference: output of final_conv, ")
    assert stdout.count("not alike on all ranks: nothing") >= 1
    assert stdout.count("moved to another layout by a rule: nothing") >= 1
    assert skimage.io.imread(folder / "unmodified.png").size
    assert "instance_norm" in (folder / "report.txt").read_text()
    assert "final_conv.weight" in (folder / "comparison.txt").read_text()


def test_a_mistake_is_told_where_the_script_is_started_itself():
    _, stderr = ended(2, 1, DEMO, "--steps", 0)
    assert_mistakes_are_told_once(DEMO, [MISTAKES["--steps 0"]], [stderr[:1]])

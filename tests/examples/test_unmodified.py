"""The demo of a public model as it is, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import skimage.io

from tests.examples.launching import assert_all_ranks_end_with, launch, launch_with_mistakes

DEMO = Path(__file__).resolve().parents[2] / "examples" / "unmodified.py"
SMALL = ("--size", "33x48", "--steps", 3)


@pytest.mark.parametrize(
    ("ranks", "arguments"), [(2, []), (3, ["--grid", "1x3"])], ids=["2, rows", "3, columns"]
)
def test_the_split_model_is_the_model_alone(ranks, arguments, tmp_path):
    folder = tmp_path / "not" / "there yet"
    outcome = launch(ranks, DEMO, *SMALL, "--output", folder, *arguments)
    assert_all_ranks_end_with(0, ranks, outcome)
    _, stdout, stderr = outcome
    assert not stderr
    assert sum(line.startswith("step ") for line in stdout) == 3
    assert {"first difference: none", "not alike on all ranks: nothing"} <= set(stdout)
    assert "moved to another layout by a rule: nothing" in stdout
    assert skimage.io.imread(folder / "unmodified.png").size
    assert "instance_norm" in (folder / "report.txt").read_text()
    assert "final_conv.weight" in (folder / "comparison.txt").read_text()


def test_a_difference_ends_all_ranks_with_1(tmp_path):
    script = tmp_path / "different.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(DEMO.parent)!r})\n"
        "import torch, unmodified\nfrom distdl_rma import distribute\n"
        "def wrong(model, grid):\n"
        "    if model.final_conv.bias.dtype == torch.float64:\n"
        "        model.final_conv.register_forward_hook(lambda module, args, y: y + 1e-3)\n"
        "    return distribute(model, grid)\n"
        "unmodified.distribute = wrong\nunmodified.leave(unmodified.main())\n"
    )
    outcome = launch(2, script, *SMALL, "--output", tmp_path)
    assert_all_ranks_end_with(1, 2, outcome)
    assert any(line.startswith("first difference: output of final_conv, ") for line in outcome[1])


MISTAKES = {
    "--grid 2x2": "--grid 2x2 needs 4 ranks, but 2 are running",
    "--size 31x40": "BasicUNet needs a height and a width of 32 or more, not 31x40",
    "--steps 0": "at least 1 step is needed, not '0'",
}


def test_every_mistake_is_told_once_and_before_anything_is_computed(tmp_path):
    outcome, told = launch_with_mistakes(2, DEMO, [case.split() for case in MISTAKES], tmp_path)
    assert_all_ranks_end_with(2, 2, outcome)
    assert len(told) == len(MISTAKES), outcome[2]
    for lines, message in zip(told, MISTAKES.values(), strict=True):
        told_here = [line for line in lines if line.startswith("unmodified.py: ")]
        assert len(told_here) == 1 and message in told_here[0], lines

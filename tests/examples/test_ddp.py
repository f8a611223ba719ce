"""The demo of replicas, run as a user runs it; these tests start MPI jobs of their own."""

from pathlib import Path

from tests.examples.launching import assert_all_ranks_end_with, launch, launch_with_mistakes

DEMO = Path(__file__).resolve().parents[2] / "examples" / "ddp.py"


def test_replicas_of_a_split_network_are_one_process_on_all_pictures():
    outcome = launch(4, DEMO, "--steps", 3)
    assert_all_ranks_end_with(0, 4, outcome)
    _, stdout, stderr = outcome
    assert not stderr
    assert "proof holds: the limit is 1e-09" in stdout
    assert sum(line.startswith("step ") for line in stdout) == 3


MISTAKES = {
    "--replicas 3": "2 ranks do not make 3 replicas of equal size",
    "--replicas 0": "at least 1 replica is needed, not '0'",
}


def test_every_mistake_is_told_once_and_before_anything_is_computed(tmp_path):
    outcome, told = launch_with_mistakes(2, DEMO, [case.split() for case in MISTAKES], tmp_path)
    assert_all_ranks_end_with(2, 2, outcome)
    for lines, message in zip(told, MISTAKES.values(), strict=True):
        said = [line for line in lines if line.startswith("ddp.py: ")]
        assert len(said) == 1 and message in said[0], lines

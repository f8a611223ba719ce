"""The demo of replicas; this test starts an MPI job of its own."""

import pytest

from tests.examples.launching import EXAMPLES, Case, assert_mistakes_are_told_once, launch_in_turn

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "ddp.py"
MISTAKES = {
    "--replicas 3": "4 ranks do not make 3 replicas of equal size",
    "--replicas 0": "at least 1 replica is needed, not '0'",
}


def test_mistakes_are_told_once_and_replicas_of_a_split_network_are_one_process_on_all_pictures(tmp_path):
    cases = [*(Case(arguments.split(), 2) for arguments in MISTAKES), Case(["--steps", 3])]
    (_, stdout, _), told = launch_in_turn(4, DEMO, cases, tmp_path)
    assert_mistakes_are_told_once(DEMO, MISTAKES.values(), told[:-1])
    assert not told[-1]
    assert "proof holds: the limit is 1e-09" in stdout
    assert sum(line.startswith("step ") for line in stdout) == 3

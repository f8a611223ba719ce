"""The example of one-sided communication; this test starts MPI jobs of its own."""

from pathlib import Path

import pytest

from tests.examples.launching import assert_all_ranks_end_with, launch

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "examples" / "heat.py"


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rod_is_bitwise_that_of_one_process(ranks):
    outcome = launch(ranks, DEMO)
    assert_all_ranks_end_with(0, ranks, outcome)
    assert f"{ranks} ranks, 250 steps: bitwise the result of one process" in outcome[1]

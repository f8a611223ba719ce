"""The example of a layer; this test starts an MPI job of its own."""

from pathlib import Path

import pytest

from tests.examples.launching import assert_all_ranks_end_with, launch

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "examples" / "response_norm.py"


def test_the_layer_is_that_of_torch():
    outcome = launch(2, DEMO)
    assert_all_ranks_end_with(0, 2, outcome)
    assert "2 ranks: output and gradient are those of torch's layer" in outcome[1]

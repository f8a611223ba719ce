"""The example of one-sided communication; this test starts MPI jobs of its own."""

import pytest

from tests.examples.launching import EXAMPLES, ended

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rod_is_bitwise_that_of_one_process(ranks):
    stdout, _ = ended(0, ranks, EXAMPLES / "heat.py")
    assert f"{ranks} ranks, 250 steps: bitwise the result of one process" in stdout

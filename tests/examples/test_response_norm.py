"""The example of a layer; this test starts an MPI job of its own."""

import pytest

from tests.examples.launching import EXAMPLES, ended

pytestmark = pytest.mark.slow


def test_the_layer_is_that_of_torch():
    stdout, _ = ended(0, 2, EXAMPLES / "response_norm.py")
    assert "2 ranks: output and gradient are those of torch's layer" in stdout

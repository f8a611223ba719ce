"""How long a wait took, for people."""

import pytest

from distdl_rma.segments.waiting.timeout_message import in_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00123456, "0.0012 s"),
        (0.5, "0.5 s"),
        (0.99629, "1 s"),
        (1.5, "1.5 s"),
        (9.99629, "10 s"),
        (12.34567, "12.3 s"),
        (300, "300 s"),
        (1234567.8, "1234567.8 s"),
        (float("inf"), "inf s"),
    ],
)
def test_a_time_is_told_in_tenths_of_a_second_or_two_digits(seconds, text):
    assert in_seconds(seconds) == text

"""Texts of errors: their causes, their times, and the state of the machine behind them."""

import pytest

from distdl_rma.errors import ExchangeTimeout, PeerFailedError, ShapeError
from distdl_rma.segments.waiting.error_texts import (
    LOST,
    USABLE,
    append_state,
    cause_of,
    ends_with_state,
    in_seconds,
)


def test_error_of_several_ranks_ends_with_the_state_of_the_machine():
    error = PeerFailedError("rank 1 failed: OSError: disk on fire", 1, "OSError: disk on fire")
    assert not ends_with_state(error)
    for state in (USABLE, LOST):
        assert str(append_state(error, state)) == f"rank 1 failed: OSError: disk on fire. {state}"
        assert (
            ends_with_state(error)
            and cause_of(error) == "PeerFailedError: rank 1 failed: OSError: disk on fire."
        )
    assert str(append_state(ExchangeTimeout("is it late?"), LOST)) == f"is it late? {LOST}"
    assert str(append_state(ShapeError("too long"), LOST)) == "too long"


def test_a_cause_is_one_line():
    assert cause_of(ShapeError("first\nsecond")) == "ShapeError: first"
    assert cause_of(KeyboardInterrupt()) == "KeyboardInterrupt"

    class Speechless(Exception):
        def __str__(self):
            raise ValueError

    assert cause_of(Speechless()) == "Speechless"


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

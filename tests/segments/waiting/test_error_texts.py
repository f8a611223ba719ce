"""Texts of errors: their causes, their times, and the state of the machine behind them."""

from types import SimpleNamespace

import pytest

from distdl_rma.errors import ExchangeTimeout, PeerFailedError, ShapeError
from distdl_rma.segments.waiting.error_texts import (
    LOST,
    USABLE,
    append_state,
    cause_of,
    chain,
    ends_with_state,
    in_seconds,
)
from distdl_rma.segments.waiting.header import WaitReason


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


MUTUAL = (
    "rank 1 waited 1 s for rank 0 to send in 'calls of Net'; rank 0 waits since 1.0 s for rank 1 to connect"
    " 'full_tensor (train.py:40:12) (redistribute)'; they wait for each other: did every rank call it?"
)
# This rank may be in the function that it began last.
ELSEWHERE = "rank 1 waits for nobody: the last that it began, 0.3 s ago, was 'sum (x.py:3:1) (sum)' (epoch 3)"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (MUTUAL, "rank 0 alone called full_tensor() at train.py:40; every rank"),
        (
            "rank 1 failed: it left, closing it; rank 0 waited for rank 1 to connect 'a mean (x.py:3:1)'",
            "rank 0 alone called mean() at x.py:3; every rank",
        ),
        (
            "rank 0 connects 'sum (x.py:3:1)' but rank 2 connects 'a conv (x.py:4:1) (adjoint)': do all?",
            "rank 0 called sum() at x.py:3, but rank 2 went backward through conv() at x.py:4; every rank",
        ),
        (
            f"rank 0 waited 15 s for rank 1 to connect 'full_tensor (a.py:40:1) (redistribute)'; {ELSEWHERE}",
            "rank 0 alone called full_tensor() at a.py:40; every rank",
        ),
        (
            "rank 0 waited 15 s for rank 1 to connect 'mean (x.py:3:1)'; rank 1 waits for nobody since 3.0 s",
            "rank 0 alone called mean() at x.py:3; every rank",
        ),
        # These do not say that a rank is elsewhere.
        (f"rank 0 waited 9 s for rank 1 to send in 'sum (x.py:3:1)'; {ELSEWHERE}", ""),
        (MUTUAL.replace("'calls of Net'", "'full_tensor (train.py:40:12) (sum)'"), ""),
        ("rank 1 failed: KeyError: 'a'; rank 0 waited for rank 1 to send in 'mean (x.py:3:1)'", ""),
        ("rank 0 waited 9 s for rank 1 to send in 'mean (x.py:3:1)'; rank 1 computes", ""),
        ("rank 0 waited 9 s for rank 1 to send in 'enc1.conv'; they wait for each other", ""),
    ],
)
def test_the_first_line_says_which_rank_called_what_alone(text, first):
    error = append_state(ExchangeTimeout(text), LOST)
    assert str(error).startswith(f"{first} has to" if first else text) and text in str(error)
    # Once only, and not in the notice to the others, who find it for themselves.
    assert str(append_state(error, LOST)).count("every rank has") == bool(first)
    assert cause_of(error) == f"ExchangeTimeout: {text}{'' if text.endswith('?') else '.'}"


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


def test_only_a_rank_whose_own_transfers_are_under_way_is_called_busy():
    own, near = {1: 0, 2: 7}, {3}
    segment = SimpleNamespace(link=lambda rank: SimpleNamespace(moving=own[rank]), moving=0)
    headers = SimpleNamespace(read=lambda *_: None, is_near=lambda rank: rank in near, segment=segment)
    reason = WaitReason((1, 2, 3), "to come")
    assert chain(headers, 0, reason, 0.5) == [
        "rank 1 is silent: no answer within 0.5 s",
        "rank 2 is busy: no answer within 0.5 s, behind 7 bytes that are under way",
        "rank 3 is silent: its header could not be read",
    ]
    segment.moving = 9
    busy = "rank 1 is busy or silent: no answer within 0.5 s, while 9 bytes are under way"
    assert chain(headers, 0, reason, 0.5)[0] == busy

"""What a rank waits for, in words."""

import pytest

from distdl_rma.segments.waiting.wait_reason import WaitReason


@pytest.mark.parametrize(
    ("ranks", "whom"),
    [
        ((3,), "rank 3"),
        ((1, 2), "ranks 1, 2"),
        ((), "the other ranks"),
        (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."),
    ],
)
def test_a_reason_names_the_ranks_and_what_they_are_to_do(ranks, whom):
    assert str(WaitReason(tuple(ranks), "to send in 'enc1'", "a hint")) == f"for {whom} to send in 'enc1'"

"""Equal facts are told from different ones by the sums of their words."""

import pytest

from distdl_rma.segments.consensus import WORDS, are_equal, halves, words_of


def summed(*facts):
    """Sums in float64, as an allreduce has them."""
    return [float(sum(column)) for column in zip(*map(words_of, facts), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4096])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_facts_are_equal_unless_those_of_some_ranks_differ(ranks, others):
    others = min(others, ranks - 1)
    facts = [*(f"delta={at}" for at in range(others)), *["delta=1.5"] * (ranks - others)]
    assert are_equal(summed(*facts), ranks) == (not others)


def test_words_are_the_halves_of_a_code_and_their_squares():
    low, low_square, high, high_square = words_of("mean")
    assert (low**2, high**2) == (low_square, high_square) and len(words_of("mean")) == WORDS
    assert halves(5 + (7 << 20) + (1 << 40)) == (5, 7)

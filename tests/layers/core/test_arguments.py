"""Arguments of layers are read as torch reads them."""

import numpy as np
import pytest

from distdl_rma import ArgumentError
from distdl_rma.layers.core.arguments import chosen_placement, per_dim

WORDS = ("replicated", "root", "cut")


def test_one_number_counts_for_all_dimensions():
    for value, wanted in ((2, (2, 2)), ((2, 3), (2, 3)), ([1], (1, 1)), (np.int64(4), (4, 4))):
        assert per_dim("Kind", "stride", value, 2, 1) == wanted


@pytest.mark.parametrize("value", [0, (1, 0), (1, 2, 3), (), "12", 1.5, None, [None, 1]])
def test_what_is_no_number_per_dimension_is_named(value):
    with pytest.raises(ArgumentError, match=r"^Kind: stride is an integer of at least 1, or 2 of them; got "):
        per_dim("Kind", "stride", value, 2, 1)


def test_both_names_of_the_placement_mean_the_same_and_the_first_word_is_the_usual_one():
    for word in WORDS:
        for given in ((word, None), (None, word), (word, word)):
            assert chosen_placement("Kind", *given, WORDS) == word
    assert chosen_placement("Kind", None, None, ("cut", "root")) == "cut"


@pytest.mark.parametrize("given", [("", None), (None, "sharded"), ("cut", None), (0, None), ("cut", "root")])
def test_other_placements_are_refused(given):
    other = r"^Kind: placement is one of \('replicated', 'root'\), got "
    both = "placement='cut' and weights='root' mean the same; give one"
    with pytest.raises(ArgumentError, match=both if all(given) else other):
        chosen_placement("Kind", *given, WORDS[:2])

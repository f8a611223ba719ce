"""Arguments of layers are read as torch reads them."""

import pytest

from distdl_rma import ArgumentError
from distdl_rma.layers.partitioned.core.arguments import chosen_placement

WORDS = ("replicated", "root", "cut")


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

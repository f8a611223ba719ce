"""Arguments of layers are read as torch reads them."""

import pytest

from distdl_rma import ArgumentError, layers
from distdl_rma.layers.partitioned.core.arguments import placed_options

WORDS = ("replicated", "root", "cut")
KIND = layers.DistributedLinear


def options(placement, weights):
    return {"placement": placement, "weights": weights, "name": "it", "bias": True}


def test_both_names_of_the_placement_mean_the_same_and_the_first_word_is_the_usual_one():
    for word in WORDS:
        for given in ((word, None), (None, word), (word, word)):
            assert placed_options(KIND, WORDS, options(*given)) == ({"name": "it"}, word)
    left = options(None, None)
    assert placed_options(KIND, ("cut", "root"), left)[1] == "cut" and left == {"bias": True}


@pytest.mark.parametrize("given", [("", None), (None, "sharded"), ("cut", None), (0, None), ("cut", "root")])
def test_other_placements_are_refused(given):
    other = r"^DistributedLinear: placement is one of \('replicated', 'root'\), got "
    both = "placement='cut' and weights='root' mean the same; give one"
    with pytest.raises(ArgumentError, match=both if all(given) else other):
        placed_options(KIND, WORDS[:2], options(*given))

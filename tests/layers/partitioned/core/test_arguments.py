"""Arguments of layers are read as torch reads them."""

from distdl_rma import layers
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

"""Names of layers, and what people call them."""

from distdl_rma.errors import ShapeError
from distdl_rma.segments.machine import Labels


class Layer:
    """What has a name, and another one for people."""

    def __init__(self, label):
        self.label = label


def test_names_count_the_layers_of_all_kinds():
    labels = Labels()
    assert [labels.new_name(kind) for kind in ("Conv", "Norm", "Conv")] == ["Conv#1", "Norm#2", "Conv#3"]


def test_texts_call_layers_by_their_labels_as_long_as_these_are_there():
    labels, conv, copy = Labels(), Layer("down.0"), Layer("up.0")
    labels.register("Conv#1", conv)
    labels.register("Conv#1 (copy 1)", copy)
    text = "'Conv#1' waits for Conv#1 (copy 1), not for Conv#11 or (copy 1)"
    assert labels.readable(text) == "'down.0' waits for up.0, not for Conv#11 or (copy 1)"
    del conv
    assert labels.readable("Conv#1, Conv#1 (copy 1)") == "Conv#1, up.0"


def test_an_error_is_read_by_labels_where_it_has_a_text():
    labels, conv = Labels(), Layer("down.0")
    labels.register("Conv#1", conv)
    for given, wanted in ((("in Conv#1", 3), ("in down.0", 3)), ((7,), (7,)), ((), ())):
        error = ShapeError(*given)
        labels.make_readable(error)
        assert error.args == wanted

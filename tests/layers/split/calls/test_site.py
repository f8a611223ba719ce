"""Ways of ranks through a program: which calls are noted, and what they are called."""

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.checks.model_calls import CallTrace
from distdl_rma.layers.split.calls.site import CALL_TRACES, THREAD, Place, Site, Step, note, pop_module


def called(function, kind="pointwise"):
    """As a dispatch would note it."""
    THREAD.stack.append(("down.0", True, False))
    note(function, kind)
    pop_module()


def test_calls_are_noted_with_their_places():
    CALL_TRACES.append(CallTrace())
    called(torch.relu)
    called(torch.Tensor.size, "query")
    CALL_TRACES.append(None)
    called(torch.sin)
    assert CALL_TRACES.pop() is None
    called(F.gelu)
    first, second = CALL_TRACES.pop().steps
    assert first.described.startswith("torch.relu in module 'down.0' at test_site.py:")
    assert second.function is F.gelu
    assert first.word != second.word
    assert first.word == Step(first.function, first.path, first.place).word


def test_what_some_ranks_keep_is_let_go_of_whatever_else_they_have_met():
    site = Site(None, "", torch.sum, Place(None, 0))
    first = site.kept("of all", object, (0, 1, 2, 3))
    for number in range(20):
        site.kept(number, object, (0, 1))
    assert site.kept("of all", object, (0, 1, 2, 3)) is first
    made = []
    for number in (*range(20), *range(4, 20), 0):
        site.kept(number, lambda number=number: made.append(number) or object(), (0, 1))
    assert made == [0, 1, 2, 3, *range(4, 20), 0]

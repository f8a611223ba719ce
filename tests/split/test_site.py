"""Ways of ranks through a program: which calls are noted, and what they are called."""

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.split.site import TRAILS, Step, Trail, enter, leave, note


def called(function, kind="pointwise"):
    """As a dispatch would note it."""
    enter("down.0")
    note(function, kind)
    leave()


def test_calls_are_noted_with_their_places():
    TRAILS.append(Trail())
    called(torch.relu)
    called(torch.Tensor.size, "query")
    TRAILS.append(None)
    called(torch.sin)
    assert TRAILS.pop() is None
    called(F.gelu)
    first, second = TRAILS.pop().steps
    assert first.described.startswith("torch.relu in module 'down.0' at test_site.py:")
    assert second.function is F.gelu
    assert first.word != second.word
    assert first.word == Step(first.function, first.path, first.place).word

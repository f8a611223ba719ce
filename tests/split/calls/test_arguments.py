"""What functions are told beside tensors, in words and numbers that are alike on all ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma.split.calls import arguments
from distdl_rma.split.calls.arguments import number_of, plainly, said_in, sample, spoken


def test_tensors_say_nothing_and_all_else_does():
    args = torch.ones(2), 1, (2, 3), nn.Parameter(torch.ones(1)), [torch.ones(1), 0.5], slice(1, None)
    assert said_in(args, {"dim": 1, "weight": torch.ones(1)}) == [
        1,
        (2, 3),
        ["Tensor", 0.5],
        [1, None, None],
        ["dim", 1],
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (-1, -2),
        ((1, 2), (1.0, 2.0)),
        ((1, 2), (2, 1)),
        (slice(1), slice(2)),
        ([], None),
        (torch.float32, torch.float64),
        (np.array([0, 1]), np.array([1, 0])),
        (np.array([0, 1]), np.array([0, 1], np.int32)),
        ({"a": 1}, {"a": 2}),
        ("same", "valid"),
    ],
)
def test_what_differs_has_another_number(one, other):
    assert number_of(said_in([one], {})) != number_of(said_in([other], {}))
    # Whether it was met before or not.
    assert number_of(said_in([one], {})) == number_of([plainly(one)])


def test_a_tuple_is_said_alike_where_no_more_are_kept(monkeypatch):
    first = number_of(said_in([(7, 11)], {}))
    monkeypatch.setattr(arguments, "_KNOWN", set())
    monkeypatch.setattr(arguments, "_MOST_KNOWN", 0)
    assert number_of(said_in([(7, 11)], {})) == first and not arguments._KNOWN


def test_numbers_go_on_from_those_before():
    assert number_of([2], number_of([1])) != number_of([1], number_of([2]))


def test_messages_leave_out_what_is_none():
    assert spoken([0.5, ["dim", 1], ["dtype", None]]) == " with 0.5, dim=1" and spoken([]) == ""
    assert spoken([..., (2, 3)]) == " with (2, 3)"


def test_samples_see_every_element_in_turn():
    x = torch.zeros(1000)
    stride = 1000 // 256
    for at in (0, 1, 999):
        changed = x.clone()
        changed[at] = 1
        assert any(sample(x, turn) != sample(changed, turn) for turn in range(stride))
    # Of any strides, and of what is not in memory none.
    assert sample(x.view(20, 50).T) != sample(torch.ones(50, 20))
    assert sample(x.to_sparse()) == sample(x.to("meta")) == sample(x[:0]) == 0

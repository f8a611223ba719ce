"""Arguments of functions: as words, checksums and samples that are alike on all ranks."""

from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma.layers.checks import arguments
from distdl_rma.layers.checks.arguments import (
    as_comparable,
    checksum,
    comparable_parts,
    described_arguments,
    differ_beyond_rounding,
    mark_compared,
    sample_of,
    summary_of,
    values_of,
)


def test_tensors_say_nothing_and_all_else_does():
    args = torch.ones(2), 1, (2, 3), nn.Parameter(torch.ones(1)), [torch.ones(1), 0.5], slice(1, None)
    words, plain = comparable_parts(args, {"dim": 1, "weight": torch.ones(1)})
    assert [x.numel() for x in plain] == [2, 1, 1, 1]
    assert words == [1, (2, 3), ["Tensor", 0.5], [1, None, None], {"dim": 1}]


def test_plain_tensors_are_found_wherever_they_are_and_those_that_a_model_holds_are_not():
    held, x = torch.ones(1), torch.zeros(1)
    mark_compared(held, True)
    _, plain = comparable_parts(
        [held, (slice(None), x), [[x], held], {"a": x}], {"b": x, "c": [x], "d": held}
    )
    assert len(plain) == 5 and all(each is x for each in plain)
    mark_compared(held, False)
    assert comparable_parts([held], {"d": held})[1] == [held, held]


class Choice(IntEnum):
    FIRST = 5
    SECOND = 6


def _apart(x, y):
    (form, mine), (_, other) = summary_of(x), summary_of(y)
    return differ_beyond_rounding(str(x.dtype), form, values_of(form, mine), values_of(form, other))


CHANGES = [
    lambda x: x.roll(1),
    lambda x: x.roll(256),
    lambda x: x.roll(256 * 16),
    lambda x: x.index_fill(0, torch.tensor([len(x) - 1]), 9),
    lambda x: torch.where(torch.arange(len(x)) == 5000, -x, x),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int16])
def test_sums_of_all_elements_tell_each_of_them(change, dtype, monkeypatch):
    monkeypatch.setattr(arguments, "_ROWS", 16)
    x = torch.linspace(-1, 2, 10_001).mul(100).to(dtype)
    assert not _apart(x, x.clone())
    assert _apart(x, change(x))
    if dtype.is_floating_point:
        assert _apart(x, torch.where(x == x.max(), float("inf"), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_sums_and_elements_that_are_rounded_otherwise_are_alike(dtype):
    x = torch.linspace(-1, 2, 10_001).to(dtype)
    y = x * (1 + 2 * torch.finfo(dtype).eps)
    assert not torch.equal(x, y) and not _apart(x, y) and not _apart(x[::100], y[::100])


@pytest.mark.parametrize("shape", [(3,), (40, 40), (1000, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_memory_that_was_compared_can_still_be_resized(shape, dtype):
    # As fully_shard does with that of weights.
    x = torch.zeros(shape, dtype=dtype)
    summary_of(x), sample_of(x, 1), sample_of(x[:, :1] if x.dim() > 1 else x)
    assert x.untyped_storage().resizable()


def test_values_of_few_elements_are_the_elements():
    for x in (torch.tensor([1.5, float("nan"), float("inf")]), torch.tensor([True]), torch.tensor(1 + 2j)):
        form, data = summary_of(x)
        numbers = values_of(form, data)
        assert not differ_beyond_rounding(form, form, numbers, numbers)
        assert differ_beyond_rounding(form, form, numbers, [7, *numbers[1:]])
    assert values_of("torch.float32", sample_of(torch.ones(0))) == []
    assert differ_beyond_rounding("torch.int64", "torch.int64", [1 << 60], [(1 << 60) + 1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (-1, -2),
        ((1, 2), (1.0, 2.0)),
        ((1, 2), (2, 1)),
        (range(1), range(2)),
        (Choice.FIRST, Choice.SECOND),
        (Choice.FIRST, 5),
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
    assert checksum(comparable_parts([one], {})[0]) != checksum(comparable_parts([other], {})[0])
    first, second = [as_comparable(one)], [as_comparable(other)]
    assert checksum(first, checksum(second)) != checksum(second, checksum(first)), "numbers go on"
    # Whether it was met before or not.
    assert checksum(comparable_parts([one], {})[0]) == checksum([as_comparable(one)])


@pytest.mark.parametrize("twin", [(np.int64(5), np.int64(13)), (5.0, 13), (Choice.FIRST, 13)])
def test_a_tuple_that_equals_one_met_before_has_the_number_that_it_has_elsewhere(twin):
    alone = checksum(comparable_parts([twin], {})[0])
    comparable_parts([(5, 13)], {})
    assert twin == (5, 13)
    assert checksum(comparable_parts([twin], {})[0]) == alone


def test_messages_leave_out_what_is_none():
    assert described_arguments([0.5, {"dim": 1}, {"dtype": None}]) == " with 0.5, dim=1"
    words, _ = comparable_parts([(..., [0])], {"dim": 1})
    assert described_arguments(words) == " with ['ellipsis', [0]], dim=1"
    assert described_arguments([]) == ""
    assert described_arguments([..., (2, 3)]) == " with (2, 3)"


def test_samples_see_every_element_in_turn():
    x = torch.zeros(1000)
    stride = 1000 // 256
    for at in (0, 1, 999):
        changed = x.clone()
        changed[at] = 1
        assert any(sample_of(x, turn) != sample_of(changed, turn) for turn in range(stride))
    # Of any strides, and of what is not in memory none.
    assert sample_of(x.view(20, 50).T) != sample_of(torch.ones(50, 20))
    assert sample_of(x.to_sparse()) == sample_of(x.to("meta")) == sample_of(x[:0]) == b""

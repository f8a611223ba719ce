"""Numbers of results by the functions and arguments that they came from."""

import pytest
import torch
from torch import nn

from distdl_rma import distribute, rehearse
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN, LossOrigin


@pytest.fixture
def number():
    """The number of a function's result, and that result."""
    lineage = LossOrigin()

    def number(function, *args, **kwargs):
        result = torch.zeros(2)
        lineage.follow("pointwise", function, args, kwargs, result)
        return result._loss_hash, result

    return number


@pytest.mark.parametrize(
    ("one", "other"), [(1, 2), (-1, -2), (0.5, 1.5), (1.0, float("nan")), ("sum", "mean"), ((1, 2), (2, 1))]
)
def test_what_is_told_otherwise_has_another_number(number, one, other):
    _, x = number(torch.relu)
    assert number(torch.mul, x, one)[0] == number(torch.mul, x, one)[0] != number(torch.mul, x, other)[0]
    assert number(torch.mul, x, by=one)[0] != number(torch.mul, x, by=other)[0]
    # Each nan is the same.
    assert number(torch.mul, x, float("nan"))[0] == number(torch.mul, x, float("nan"))[0]


def test_results_go_on_from_their_arguments_labels_and_grad_modes(number):
    (first, x), (second, y), labels = number(torch.relu), number(torch.abs), torch.ones(3)
    assert first != second and number(torch.square, x)[0] != number(torch.square, y)[0]
    found, _ = number(torch.sub, x, labels)
    assert found == number(torch.sub, x, labels.clone())[0] != number(torch.sub, x, labels + 1)[0]
    with torch.no_grad():
        assert number(torch.sub, x, labels)[0] != found


def test_what_is_computed_of_weights_counts_to_three_digits(number):
    (_, x), term = number(torch.relu), torch.ones(2, requires_grad=True) * 0.5
    found, _ = number(torch.add, x, term)
    assert found == number(torch.add, x, term * (1 + 1e-6))[0] != number(torch.add, x, term * 1.1)[0]


def test_what_only_asks_is_not_followed():
    LossOrigin().follow("query", torch.Tensor.size, (), {}, result := torch.zeros(2))
    assert not hasattr(result, "_loss_hash")


def test_several_results_have_numbers_of_their_own():
    lineage, parts = LossOrigin(), [torch.zeros(1), torch.zeros(1)]
    lineage.follow("movement", torch.chunk, (torch.zeros(2), 2), {}, parts)
    assert parts[0]._loss_hash != parts[1]._loss_hash


def test_open_models_are_those_of_each_virtual_rank():
    def play(comm):
        before, model = len(LOSS_ORIGIN.on), distribute(nn.Conv2d(1, 1, 1), {"H": -1})
        if comm.rank == 0:
            model.distributed.close()
        comm.Barrier()
        after = len(LOSS_ORIGIN.on)
        comm.Barrier()
        if comm.rank > 0:
            model.distributed.close()
        return before, after, len(LOSS_ORIGIN.on)

    known = len(LOSS_ORIGIN.on)
    # As an open model of this process has it.
    LOSS_ORIGIN.on.append(None)
    assert rehearse(3, play) == [(0, 0, 0), (0, 1, 0), (0, 1, 0)]
    assert len(LOSS_ORIGIN.on) == known + 1
    del LOSS_ORIGIN.on[-1:]

"""Numbers of results by the functions and arguments that they came from."""

import pytest
import torch
from torch import nn

from distdl_rma import distribute, rehearse
from distdl_rma.split.calls.loss_origin import LOSS_ORIGIN, LossOrigin


@pytest.fixture
def way():
    lineage = LossOrigin()

    def way(function, *args, kind="pointwise", **kwargs):
        result = torch.zeros(2)
        lineage.follow(kind, function, args, kwargs, result)
        return result

    return way


@pytest.mark.parametrize(
    ("one", "other"), [(1, 2), (-1, -2), (0.5, 1.5), (1.0, float("nan")), ("sum", "mean"), ((1, 2), (2, 1))]
)
def test_what_is_told_otherwise_has_another_number(way, one, other):
    x = way(torch.relu)
    assert (
        way(torch.mul, x, one)._loss_hash
        == way(torch.mul, x, one)._loss_hash
        != way(torch.mul, x, other)._loss_hash
    )
    assert way(torch.mul, x, by=one)._loss_hash != way(torch.mul, x, by=other)._loss_hash


def test_each_nan_is_the_same(way):
    x = way(torch.relu)
    assert way(torch.mul, x, float("nan"))._loss_hash == way(torch.mul, x, float("nan"))._loss_hash


def test_results_go_on_from_their_arguments(way):
    x, y = way(torch.relu), way(torch.abs)
    assert x._loss_hash != y._loss_hash and way(torch.square, x)._loss_hash != way(torch.square, y)._loss_hash


def test_labels_and_grad_modes_count(way):
    x, labels = way(torch.relu), torch.ones(3)
    found = way(torch.sub, x, labels)._loss_hash
    assert found == way(torch.sub, x, labels.clone())._loss_hash != way(torch.sub, x, labels + 1)._loss_hash
    with torch.no_grad():
        assert way(torch.sub, x, labels)._loss_hash != found


def test_what_is_computed_of_weights_counts_to_three_digits(way):
    x, term = way(torch.relu), torch.ones(2, requires_grad=True) * 0.5
    found = way(torch.add, x, term)._loss_hash
    assert (
        found == way(torch.add, x, term * (1 + 1e-6))._loss_hash != way(torch.add, x, term * 1.1)._loss_hash
    )


def test_what_only_asks_is_not_followed(way):
    assert not hasattr(way(torch.Tensor.size, kind="query"), "_loss_hash")


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

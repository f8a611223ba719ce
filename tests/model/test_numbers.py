"""Numbers that are not alike on all ranks: found at the end of a call, or when the next one begins."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import MismatchError, distribute
from distdl_rma.split.calls import arguments
from distdl_rma.split.calls.lineage import LINEAGE

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.act = torch.relu

    def forward(self, x):
        return self.act(self.first(x))


def _with_graph(graph, act):
    with torch.set_grad_enabled(graph):
        return act()


INSIDE = {
    "factor": (lambda y, odd: y * (0.5 + odd), r"mul .* with 0.5; rank 1: .* with 1.5"),
    "keyword": (lambda y, odd: F.leaky_relu(y, negative_slope=0.1 * (1 + odd)), "negative_slope=0.2"),
    "probability": (lambda y, odd: F.dropout(y, 0.1 * (1 + odd)), "dropout"),
    "dimension": (lambda y, odd: y.cumsum(-3 - odd), "cumsum .*-4"),
    "slice": (lambda y, odd: y[..., odd : odd + 2], r"getitem.*\[0, 2, None\].*\[1, 3, None\]"),
    "graph": (lambda y, odd: _with_graph(not odd, y.abs), "another grad mode"),
    "array": (lambda y, odd: y[..., np.array([0, 2 + odd])], r"getitem.*'<i8', 2"),
    "type": (lambda y, odd: y.to(torch.bfloat16 if odd else torch.float16).float(), "bfloat16"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_of_a_model(model, x, odd, name):
    act, said = INSIDE[name]
    model.act = lambda y: act(y, int(odd))
    with pytest.raises(MismatchError, match=f"different ways: after 1 equal calls.*{said}"):
        model(x)
    model.act = lambda y: act(y, 0)
    model(x).sum().backward()


ZEROS = torch.zeros(1, 2, 12, 8)
LOSSES = {
    "factor": (lambda y, odd: F.mse_loss(y, ZEROS) + (0.1 + odd) * y.abs().mean(), r"mul with 0\.1.*1\.1"),
    "labels": (lambda y, odd: F.mse_loss(y, ZEROS + odd), "labels"),
    "list": (lambda y, odd: torch.stack([y.sum(), y.mean() * (1 + odd)]).sum(), "mul with 1; .*mul with 2"),
    "function": (lambda y, odd: (y.abs() if odd else y.square()).sum(), "abs.*square|square.*abs"),
    "minus one": (lambda y, odd: (y * (-1 - odd)).sum(), r"mul with -1; .*mul with -2"),
    "no number": (lambda y, odd: (y * (float("nan"), 2.0)[odd]).sum(), r"mul with nan; .*mul with 2\.0"),
    "keyword": (lambda y, odd: F.huber_loss(y, ZEROS, delta=0.5 + odd), "0.5.*1.5"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_in_a_loss(model, x, odd, name):
    loss, said = LOSSES[name]
    loss(model(x), int(odd)).backward()
    with pytest.raises(MismatchError, match=rf"backward before this call .*{said}"):
        model(x)
    loss(model(x), 0).backward()
    model(x)


def test_each_backward_of_a_step_counts(model, x, odd):
    y = model(x)
    (y * (1 + odd)).sum().backward(retain_graph=True)
    y.mean().backward()
    with pytest.raises(MismatchError, match=r"before this call .*mul with 1; .*mul with 2\."):
        model(x)


def test_penalties_of_parameters_in_a_loss(model, x, odd):
    (model(x).mean() + (0.1 + odd) * model.first.weight.square().sum()).backward()
    with pytest.raises(MismatchError, match="backward before this call"):
        model(x)
    y = model(x)
    (_with_graph(not odd, y.abs).mean() + y.mean()).backward()
    with pytest.raises(MismatchError, match="backward before this call"):
        model(x)
    for _ in range(2):
        (model(x).mean() + 0.1 * model.first.weight.square().sum()).backward()


def test_what_one_rank_computes_for_itself_is_free(model, x, odd):
    for _ in range(2):
        loss = F.mse_loss(model(x), torch.ones(1, 2, 12, 8))
        if odd:
            assert (loss.detach() * 100).item() > 0
            assert (loss / 3).item() > 0
        (loss / 2).backward()
    model(x)


def test_losses_with_arrays_and_what_is_no_number(model, x):
    for _ in range(3):
        y = model(x)[:, :, np.array([0, 2])]
        torch.where(y > 1e9, float("nan"), y).masked_fill(y < -1e9, float("nan")).sum().backward()
    model(x)


def test_backwards_that_some_ranks_followed_before_are_not_compared(P_world, x, odd, monkeypatch):
    monkeypatch.setattr(LINEAGE, "on", 0)
    first, other = distribute(Net(), {"H": -1}), distribute(Net(), {"H": -1}, check_copies=False)
    loss = other(x).sum()
    if odd:
        first.distributed.close()
    loss.backward()
    if not odd:
        first.distributed.close()
    last = distribute(Net(), {"H": -1})
    last(x).sum().backward()
    with last.distributed.unchecked():
        last.distributed.close()
    other.distributed.close()
    assert LINEAGE.on == 0


def test_a_copy_follows_backwards_when_its_model_is_closed(P_world, x, odd, monkeypatch):
    monkeypatch.setattr(LINEAGE, "on", 0)
    model = distribute(Net(), {"H": -1})
    twin = copy.deepcopy(model)
    loss = twin(x).sum()
    if odd:
        model.distributed.close()
    loss.backward()
    if not odd:
        model.distributed.close()
    twin(x).sum().backward()
    twin.distributed.close()
    assert LINEAGE.on == 0


def test_a_rank_that_has_met_many_tuples_says_the_same(model, x, odd, monkeypatch):
    monkeypatch.setattr(arguments, "_KNOWN", set())
    if odd:
        monkeypatch.setattr(arguments, "_MOST_KNOWN", 0)
    model.act = lambda y: F.pad(y, (1, 1, 0, 0))
    for _ in range(2):
        model(x).sum().backward()


def test_slices_that_are_written_belong_to_what_is_computed(model, x, odd):
    y = model(x).clone()
    y[:, :, 0] = float(odd)
    y.sum().backward()
    with pytest.raises(MismatchError, match=r"setitem.* 1\.0"):
        model(x)

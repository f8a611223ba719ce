"""Numbers that are not alike on all ranks: found at the end of a call, or when the next one begins."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import MismatchError, distribute, shard
from distdl_rma.layers.checks.model_calls import CallTrace
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN

pytestmark = pytest.mark.mpi(min_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 3)
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


def _plain(odd, *shape):
    return torch.arange(1.0 + odd, 1 + odd + torch.Size(shape).numel()).view(shape)


def _written(y, value):
    y = y * 1
    y[:, :, :2] = value
    return y


ZEROS, INFINITE, AT = torch.zeros(1, 2, 12, 8), torch.tensor([0, -torch.inf]), torch.tensor([77])
# A plain tensor that a function is given.
GIVEN = {
    "number": (lambda y, odd: y * torch.tensor(0.5 + odd), "mul", "()"),
    "samples": (lambda y, odd: y * _plain(odd, 1, 2, 1, 1), "mul", "(1, 2, 1, 1)"),
    "reflected": (lambda y, odd: torch.tensor(2.0 + odd) - y, "sub", "()"),
    "index": (lambda y, odd: y[:, torch.tensor([odd, 1])], "getitem", "(2,)"),
    "indices": (lambda y, odd: y[:, :, 1:, torch.tensor([odd, 1])], "getitem", "(2,)"),
    "condition": (lambda y, odd: torch.where(_plain(odd, 1, 2, 1, 1) > 2, y, -y), "where", "(1, 2, 1, 1)"),
    "keyword": (lambda y, odd: F.conv2d(y, weight=_plain(odd, 2, 2, 1, 1)), "conv2d", "(2, 2, 1, 1)"),
    "list": (lambda y, odd: torch.cat([y, _plain(odd, 1, 2, 12, 8)]), "cat", "(1, 2, 12, 8)"),
    "value": (lambda y, odd: _written(y, torch.tensor(float(odd))), "setitem", "()"),
    "infinite": (lambda y, odd: y.exp() + INFINITE.roll(odd).view(2, 1, 1), "add", "(2, 1, 1)"),
    "own part": (lambda y, _: y / y.to_local().amax((2, 3), keepdim=True), "div", "(1, 2, 1, 1)"),
    "one of many": (
        lambda y, odd: y + ZEROS[0].view(-1).index_fill(0, AT, odd).view(2, 12, 8),
        "add",
        "(2, 12, 8)",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("graph", [True, False])
def test_plain_tensors_inside_of_a_model(model, x, odd, name, graph):
    act, function, shape = GIVEN[name]
    model.act = lambda y: act(y, int(odd))
    where = rf"{function}\w* in module 'model' at test_numbers.py:\d+"
    said = rf"{where} .*given a plain tensor of shape {re.escape(shape)} that"
    with torch.set_grad_enabled(graph), pytest.raises(MismatchError, match=said):
        model(x)
    model.act = torch.relu if name == "own part" else lambda y: act(y, 0)
    for _ in range(2):
        model(x).sum().backward()


def test_all_elements_in_the_first_call_and_later_all_in_turn(model, x, odd):
    table = torch.zeros(40, 40)
    model.act = lambda y: F.interpolate(y, (40, 40)) + table
    table[17, 3] = float(odd)
    with pytest.raises(MismatchError, match=r"\(40, 40\)"):
        model(x)
    table[17, 3] = 0
    model(x)
    table[17, 3] = float(odd)
    with pytest.raises(MismatchError, match=r"\(40, 40\)"):
        [model(x) for _ in range(40 * 40 // 256 + 1)]


def test_plain_tensors_that_only_are_rounded_otherwise_or_are_not_read(model, x, odd):
    def act(y):
        y = y * (_plain(0, 2, 1, 1) * (1 + 2e-7 * odd)) + model.first.weight.softmax(0).sum()
        y = y + model.first.weight.detach().mean() * (1 + 1e-6 * odd)
        y = y.view_as(torch.full((1, 2, 12, 8), float(odd)))
        written = torch.full((1, 2, 12, 8), float(odd))
        written[:, :1] = y[:, :1]
        written[:, 1:] = y[:, 1:]
        return written

    model.act = act
    for _ in range(3):
        y = model(x)
        y.sum().backward()
    assert y.full_tensor().max() > 1


def test_plain_tensors_in_a_checkpoint_and_a_model_within_a_model(split_of, x, odd):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            # No part of this one, which would be refused.
            self.inner, self.apart = [split_of(Net())], 0
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            def act(y):
                y = self.inner[0](y[:, :1] * self.scale)
                return y * torch.tensor([1.0, 2.0 + self.apart]).view(2, 1, 1)

            return checkpoint(act, checkpoint(act, x, use_reentrant=False), use_reentrant=False)

    outer = distribute(Outer(), {"H": -1})
    for apart in (0, 1, 0, 1, 0):
        outer.apart = apart * int(odd)
        if apart:
            with pytest.raises(MismatchError, match=r"mul in module 'model' at .*shape \(2, 1, 1\)"):
                outer(x)
        else:
            outer(x).sum().backward()
    outer.apart = 0
    outer.inner[0].act = lambda y: y + torch.tensor(float(odd))
    with pytest.raises(MismatchError, match=r"add in module .*shape \(\)"):
        outer(x)
    outer.distributed.close()


@pytest.mark.parametrize("norm", [[nn.BatchNorm2d(2)], []])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_what_a_model_holds_is_compared_by_it_alone(split_of, x, monkeypatch, norm, reduction):
    given = []
    monkeypatch.setattr(CallTrace, "note_plain", lambda *args: given.append(args))
    torch.manual_seed(1)
    model = split_of(nn.Sequential(nn.Conv2d(1, 2, 1), *norm, nn.PReLU()), reduction=reduction)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    for _ in range(2):
        model(x).sum().backward()
    # Buffers too, but where others sum, who look after the parameters alone.
    assert bool(given) == (reduction == "none" and bool(norm))
    model.distributed.close()
    assert not any(vars(each) for each in (*model.parameters(), *model.buffers()))


def test_plain_tensors_are_left_out_with_the_rest(split_of, x, odd):
    model = split_of(Net(), check_copies=False)
    model.act = lambda y: y * torch.tensor(1.0 + odd)
    model(x)


LOSSES = {
    "factor": (lambda y, odd: F.mse_loss(y, ZEROS) + (0.1 + odd) * y.abs().mean(), r"mul with 0\.1.*1\.1"),
    "labels": (lambda y, odd: F.mse_loss(y, ZEROS + odd), "labels"),
    "list": (lambda y, odd: torch.stack([y.sum(), y.mean() * (1 + odd)]).sum(), "mul with 1; .*mul with 2"),
    "function": (lambda y, odd: (y.abs() if odd else y.square()).sum(), "abs.*square|square.*abs"),
    "minus one": (lambda y, odd: (y * (-1 - odd)).sum(), r"mul with -1; .*mul with -2"),
    "no number": (lambda y, odd: (y * (float("nan"), 2.0)[odd]).sum(), r"mul with nan; .*mul with 2\.0"),
    "keyword": (lambda y, odd: F.huber_loss(y, ZEROS, delta=0.5 + odd), "0.5.*1.5"),
    "written slices": (lambda y, odd: _written(y, float(odd)).sum(), r"setitem.* 1\.0"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_in_a_loss(model, x, odd, name):
    loss, said = LOSSES[name]
    loss(model(x), int(odd)).backward()
    with pytest.raises(MismatchError, match=rf"step before this call .*{said}"):
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
    with pytest.raises(MismatchError, match="loss of the step before this call differs"):
        model(x)
    y = model(x)
    (_with_graph(not odd, y.abs).mean() + y.mean()).backward()
    with pytest.raises(MismatchError, match="loss of the step before this call differs"):
        model(x)
    for _ in range(2):
        (model(x).mean() + 0.1 * model.first.weight.square().sum()).backward()
        sum(p.square().sum() for p in model.parameters()).backward()
    model(x)


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


def test_backwards_that_some_ranks_followed_before_are_not_compared(split_of, x, odd, monkeypatch):
    monkeypatch.setattr(LOSS_ORIGIN, "on", [])
    first, other = split_of(Net()), split_of(Net(), check_copies=False)
    loss = other(x).sum()
    if odd:
        first.distributed.close()
    loss.backward()
    if not odd:
        first.distributed.close()
    last = split_of(Net())
    last(x).sum().backward()
    with last.distributed.unchecked():
        last.distributed.close()
    other.distributed.close()
    assert not LOSS_ORIGIN.on


def test_a_copy_follows_backwards_when_its_model_is_closed(split_of, x, odd, monkeypatch):
    monkeypatch.setattr(LOSS_ORIGIN, "on", [])
    model = split_of(Net())
    twin = copy.deepcopy(model)
    loss = twin(x).sum()
    if odd:
        model.distributed.close()
    loss.backward()
    if not odd:
        model.distributed.close()
    twin(x).sum().backward()
    twin.distributed.close()
    assert not LOSS_ORIGIN.on


def head(model, y):
    return model.head(y.mean((0, 1, 2)))


def test_labels_behind_a_full_tensor(model, x, comm):
    y = head(model, model(x).full_tensor())
    F.mse_loss(y, torch.full((3,), float(comm.rank == 1))).backward()
    with pytest.raises(MismatchError, match=r"gradient of '(head\.\w+|full_tensor\(\))' was not alike"):
        model(x)
    for _ in range(2):
        F.mse_loss(head(model, model(x).full_tensor()), torch.ones(3)).backward()


def test_parameters_behind_a_block_without_a_graph(model, x):
    block = shard({"H": -1}, x).to_local()
    head(model, block).sum().backward()
    with pytest.raises(
        MismatchError, match=r"gradient of 'head\.\w+'.*to_local\(\) of a tensor that is in no"
    ):
        model(x)
    head(model, model(x).to_local()).sum().backward()
    model(x)


LOCAL = {
    "mse": (F.mse_loss, True),
    "l1 and a penalty": (lambda y, t: 0.5 * F.l1_loss(y, t) + (y - t).square().sum() / 192, True),
    "all dimensions": (lambda y, t: (y - t).abs().mean((0, 1, 2, 3)), True),
    "classes": (lambda y, t: F.cross_entropy(y, t[:, 0].long()), True),
    "probabilities": (lambda y, t: F.cross_entropy(y, t.softmax(1)), True),
    "weights": (lambda y, t: F.cross_entropy(y, t.softmax(1), torch.ones(2), label_smoothing=0.1), True),
    "a sum of probabilities": (lambda y, t: -(t.softmax(1) * F.log_softmax(y, 1)).sum() / 96, False),
    "sum of cross entropies": (lambda y, t: F.cross_entropy(y, t.softmax(1), reduction="sum") / 96, False),
    "sum": (lambda y, t: F.mse_loss(y, t, reduction="sum") / 192, False),
    "one dimension": (lambda y, t: (y - t).square().mean(3).sum() / 24, False),
}


@pytest.mark.parametrize("loss", LOCAL)
def test_a_local_mean_is_warned_of_and_a_local_sum_is_not(model, x, comm, loss):
    loss, is_mean = LOCAL[loss]
    y = model(x)
    value = loss(y.to_local(), shard({"H": -1}, ZEROS).to_local())
    if is_mean and comm.rank == 0:
        with pytest.warns(UserWarning, match="begins at a mean over this rank's part") as found:
            value.backward()
        assert found[0].filename == __file__
    else:
        value.backward()
    # Of what all ranks have, of all of it, and of the split tensor itself.
    y = model(x)
    _ = y.to_local()
    F.mse_loss(model(x).redistribute().to_local(), ZEROS).backward()
    (F.mse_loss(y.full_tensor(), ZEROS) + y.to_local().square().sum() / 192).backward()
    F.mse_loss(model(x), ZEROS).backward()

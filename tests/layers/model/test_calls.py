"""Calls of a distributed model that some ranks begin, go through or end otherwise than others."""

import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import (
    ExchangeTimeout,
    Machine,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    UnsupportedError,
    distribute,
    shard,
)
from distdl_rma.layers.split import SplitTensor
from distdl_rma.segments.waiting.error_texts import LOST

pytestmark = pytest.mark.mpi(min_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.second, self.third = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.act = torch.relu

    def forward(self, x):
        return self.act(self.norm(self.first(x))).square()


def still_works(model, x):
    model.train()
    model(x).sum().backward()


def test_modes_that_differ(model, x, odd):
    model.train(not odd)
    with pytest.raises(MismatchError, match=r"rank 1: .*is in eval\(\), records") as found:
        model(x)
    assert "is in train()" in str(found.value)
    model.train()
    model.norm.train(not odd)
    with pytest.raises(MismatchError, match="but for 'norm'"):
        model(x)
    still_works(model, x)
    with torch.set_grad_enabled(not odd), pytest.raises(MismatchError, match="records no graph"):
        model(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=odd), pytest.raises(MismatchError, match="autocast"):
        model(x)
    still_works(model, x)


def test_inputs_that_differ(model, x, odd, comm, P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    rows = 4 - odd
    with pytest.raises(MismatchError, match=rf"passes \(1, 1, {3 * comm.size}, 8\)"):
        model(SplitTensor.from_local(x[:, :, :rows], P_x, (1, 1, rows * comm.size, 8)))
    with pytest.raises(MismatchError, match="float64"):
        model(shard(P_x, x.double() if odd else x))
    with pytest.raises(MismatchError, match="requires a gradient"):
        model(shard(P_x, x.clone().requires_grad_(odd)))
    still_works(model, x)


def test_arguments_that_differ_and_are_no_tensors_to_cut(model, x, odd):
    model.forward = lambda x, scale=1.0, name="a", **options: model.act(model.first(x)) * scale
    for given, said in (
        (((None if odd else x),), "no tensor|None"),
        ((x.tolist() if odd else x,), "no tensor"),
        ((x[0, 0] if odd else x,), r"passes \(12, 8\)"),
        ((x, 2.0 + odd), r"\[3\.0\]"),
        ((x, 2.0, *["b"] * odd), r"\[2\.0, 'b'\]"),
    ):
        with pytest.raises(MismatchError, match=said):
            model(*given)
    with pytest.raises(MismatchError, match="'name', 'c'"):
        model(x, **({"name": "c"} if odd else {"flag": True}))
    model(x, 2.0, name="d").sum().backward()


def test_functions_on_blocks_that_differ(model, x, odd):
    good = model.act
    for of_odd, of_others, words in (
        (torch.sin, torch.cos, r"went different ways: after 2 equal calls.*cos.*test_calls.*sin"),
        (torch.sin, lambda y: y, r"torch\.sin"),
        (torch.square, lambda y: y, "different ways"),
    ):
        model.act = of_odd if odd else of_others
        with pytest.raises(MismatchError, match=words):
            model(x)
    model.act = good
    still_works(model, x)


def test_questions_are_free(model, x, odd):
    def act(y):
        if odd:
            assert y.shape[2] == 12 and y.dim() == 4 and y.requires_grad and repr(y)
        return torch.relu(y)

    model.act = act
    still_works(model, x)


def test_an_exception_on_all_ranks_leaves_the_machine_usable(model, x):
    def broken(y):
        raise ValueError("no such sample")

    def refused(y):
        return y.as_strided((1,), (1,))

    good, expected = model.act, model(x).full_tensor()
    for act, kind in ((broken, ValueError), (refused, UnsupportedError), (broken, ValueError)):
        model.act = act
        with pytest.raises(kind):
            model(x)
        model.act = good
        torch.testing.assert_close(model(x).full_tensor(), expected)


def test_calls_inside_a_handler_of_another_exception(model, x):
    try:
        raise KeyError("the user's own")
    except KeyError:
        still_works(model, x)


@pytest.mark.processes
def test_a_second_thread_in_a_call_is_refused_and_leaves_the_first_alone(model, x):
    refused = []

    def call():
        with pytest.raises(ProtocolError, match="while thread 'MainThread' is in a call"):
            model(x)
        refused.append(True)

    def at_once(*_):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = model.norm.register_forward_hook(at_once)
    model(x).sum().backward()
    handle.remove()
    assert refused
    still_works(model, x)
    # One after the other they may.
    thread = threading.Thread(target=still_works, args=(model, x))
    thread.start()
    thread.join()
    still_works(model, x)


def told(comm, act, odd_rank=1):
    """Types and texts of the errors of all ranks, on a machine that then cannot be used further."""
    # Closing it may say again that a rank has failed.
    with suppress(PeerFailedError), Machine(comm, segment_size="8MiB", timeout=60) as machine:
        torch.manual_seed(1)
        model = distribute(Net(), machine.partition((1, 1, comm.size, 1)))
        x = torch.randn(1, 1, 12, 8)
        model(x).square().mean().backward()
        # Not so long as to be taken for a hang.
        machine.segments.waiter.timeout = 3
        comm.Barrier()
        with pytest.raises(Exception) as found:
            act(model, x, int(comm.rank == odd_rank))
        text = str(found.value)
        assert found.type in (MismatchError, PeerFailedError, ExchangeTimeout) or comm.rank == odd_rank, text
        said = comm.allgather(f"{found.type.__name__}: {text}")
    return said


def calls(*steps):
    """In each call the model computes the first of two functions on its block, on the odd rank the second."""

    def act(model, x, odd):
        for step in steps:
            model.act = partial(step[odd], model)
            model(x)

    return act


def same(model, y):
    return model.second(y)


def third(model, y):
    return model.third(y)


def twice(model, y):
    return model.second(model.second(y))


def without_a_graph(model, x, odd):
    with torch.no_grad():
        calls((lambda _, y: y, twice), (twice, lambda _, y: y))(model, x, odd)


def goes_backward(model, x, odd):
    y = model(x).sum()
    if odd:
        y.backward()
    model(x)


def reduces_elsewhere(model, x, odd):
    y = model(x)
    for step in range(2):
        if odd == step:
            y.sum()
        else:
            y.sum()


# What the odd rank does, and what the errors say.
WAYS = {
    "another function of the same geometry": (calls((same, third)), ["second conv2d (", "third conv2d ("]),
    "when both are connected": (
        calls((same, same), (same, same), (same, third)),
        ["second conv2d (", "third conv2d ("],
    ),
    "a module more": (calls((same, twice)), ["second conv2d ("]),
    "later made up for": (without_a_graph, ["second conv2d (", "to send in 'calls of Net"]),
    "backward on one rank": (goes_backward, ["to send in 'calls of Net", "adjoint"]),
    "other reductions of the same geometry": (reduces_elsewhere, ["sum (test_calls.py:"]),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", WAYS)
def test_different_ways_are_an_error_on_all_ranks(comm, name):
    act, expected = WAYS[name]
    said = told(comm, act)
    assert all(each.startswith(("ExchangeTimeout", "PeerFailedError", "MismatchError")) for each in said), (
        said
    )
    assert all(part in " ".join(said) for part in expected), said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("odd_rank", [0, -1])
@pytest.mark.parametrize(
    "step",
    [
        (lambda _, y: y.roll(1, 2), lambda _, y: y.roll(3, 2)),
        # A sum over columns moves nothing: those ranks are at the end of the call while another sums.
        (lambda _, y: y.sum(3), lambda _, y: y.sum(2)),
    ],
)
def test_functions_that_move_other_data_leave_a_machine_that_all_ranks_call_lost(comm, step, odd_rank):
    # With three ranks one of them may hear of it by another's notice.
    said = told(comm, calls(step), odd_rank % comm.size)
    assert all(text.endswith(f" {LOST}") for text in said), said


def on_fire(_model, y):
    raise OSError("disk on fire")


def has_a_hook_that_raises(model, x, odd):
    y = model(x)
    y.register_hook(lambda gradient: [gradient][odd])
    y.square().mean().backward()


def has_labels_that_are_none(model, x, odd):
    y = model(x)
    F.cross_entropy(y, torch.full((1, 12, 8), 7 * odd))
    y.sum()


ERRORS = {
    "OSError: disk on fire": calls((same, on_fire)),
    "UnsupportedError": calls((same, lambda _, y: y.as_strided((1,), (1,)))),
    "IndexError: list": has_a_hook_that_raises,
    "IndexError: Target": has_labels_that_are_none,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_one_rank_reaches_the_others(comm, error):
    for rank, text in enumerate(told(comm, ERRORS[error])):
        assert text.startswith(("" if rank == 1 else "PeerFailedError: rank 1 failed: ") + error), text

"""Calls of split tensors that differ between ranks: all raise, and the error says how the machine is left."""

import random
import time

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, SplitTensor, shard
from distdl_rma.segments.waiting.error_texts import LOST, OF_SEVERAL_RANKS, USABLE

WHOLE = torch.arange(24.0 * 8 * 4, dtype=torch.float64).reshape(24, 8, 4)


class _Rolled(torch.autograd.Function):
    # Rolls back by another number than forward, if it is told to.
    @staticmethod
    def forward(ctx, x, shift):
        ctx.shift = shift
        return x.roll(1, 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.roll(-ctx.shift, 0), None


def _pooled(x, kernel):
    return F.max_pool2d(x.permute(1, 2, 0)[None], (1, kernel), 1, (0, kernel // 2))


def _cut_elsewhere(x, dim):
    return x.redistribute(dim, None, None) if isinstance(x, SplitTensor) else x


def _backward(x, shift):
    leaf = x.detach().requires_grad_()
    (_Rolled.apply(leaf * 2, shift) * leaf).sum().backward()
    return leaf.grad


# Two calls with the same line for either argument, and what the ranks pass: the first alone on rank 0.
CALLS = {
    "another roll": (lambda x, n: x.roll(n, 0), 1, 2),
    "no roll": (lambda x, n: x.roll(n, 0), 0, 1),
    "another kernel": (_pooled, 3, 5),
    "another dimension": (lambda x, n: x.sum(n), 0, 1),
    "no sum over ranks": (lambda x, n: x.sum(n), 1, 0),
    "another function": (lambda x, f: f(x), torch.relu, lambda x: x.roll(1, 0)),
    "another line": (lambda x, f: f(x), lambda x: x.roll(1, 0), lambda x: x.roll(1, 0)),
    "another layout": (_cut_elsewhere, 1, 2),
    "another backward": (_backward, 1, 2),
}


@pytest.fixture
def mine(comm):
    """A machine of this test, and the tensor split on it."""
    with Machine(comm, segment_size="16MiB", timeout=120) as machine:
        yield machine, shard(machine.partition((machine.size, 1, 1)), WHOLE)


def _be_late():
    time.sleep(random.choice((0, 0, 1e-3, 0.05)) * random.random())


def _error(call):
    begin = time.monotonic()
    with pytest.raises(OF_SEVERAL_RANKS) as caught:
        call()
    # Long before the timeout, though the first backward of all imports a lot.
    assert time.monotonic() - begin < 60
    return caught.value


def _check(x, call, *values):
    # All ranks, twice: with new plans and with those.
    for value in values * 2:
        _be_late()
        expected, found = call(WHOLE.clone(), value), call(x, value)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found.full_tensor(), expected)
    leaf = x.detach().requires_grad_()
    (leaf.roll(5, 0) * leaf).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), WHOLE.roll(5, 0) + WHOLE.roll(-5, 0))


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("known", ["new", "known to one rank", "known to all"])
@pytest.mark.parametrize("kind", CALLS)
def test_calls_that_differ_raise_on_all_ranks_and_the_machine_goes_on(mine, kind, known):
    machine, x = mine
    call, first, others = CALLS[kind]
    for value in {"new": (), "known to one rank": (first,), "known to all": (first, others)}[known]:
        call(x, value)

    def differ():
        _be_late()
        call(x, first if machine.rank == 0 else others)
        # Ranks that wait for nobody in it, and have begun to do something else.
        _be_late()
        x.sum(0)
        x.roll(3, 0)

    for _ in range(2):
        assert str(_error(differ)).endswith(f" {USABLE}")
    _check(x, call, first, others)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_every_rank_rolls_by_another_number(mine):
    machine, x = mine
    for _ in range(3):
        assert str(_error(lambda: x.roll(machine.rank, 0).sum(0))).endswith(f" {USABLE}")
    _check(x, lambda x, n: x.roll(n, 0), 1, 2)


@pytest.mark.mpi(min_size=3)
def test_a_rank_that_does_not_raise_in_time_leaves_a_machine_that_is_lost(comm, monkeypatch):
    monkeypatch.setattr("distdl_rma.segments.machine.GRACE_SECONDS", 1.5)
    machine = Machine(comm, segment_size="16MiB", timeout=2)
    x = shard(machine.partition((machine.size, 1, 1)), WHOLE)
    if machine.rank < 2:
        assert str(_error(lambda: x.roll(1 + machine.rank, 0))).endswith(f" {LOST}")
    comm.Barrier()
    # For good, and on the rank that was late too.
    for _ in range(2):
        assert str(_error(lambda: x.roll(1, 0))).endswith(f" {LOST}")
    machine.close()


@pytest.mark.mpi(min_size=2)
def test_split_tensors_made_at_two_places_are_named_by_what_the_user_called(mine):
    machine, x = mine
    block = x.to_local()
    SplitTensor.from_local(block, x.partition)

    def differ():
        if machine.rank == 0:
            SplitTensor.from_local(block, x.partition)
        SplitTensor.from_local(block, x.partition)

    assert str(_error(differ)).count("from_local (test_mismatches.py") == 2

"""Checkpoints within compiled models, and what a recording keeps: equal to the split model, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import UnsupportedError, distribute
from distdl_rma.layers.capture.program import Program
from tests.layers.model.test_compile import Pair, kinds, replayed, square

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]


def _reads_a_buffer(model, x):
    # The backward of a product needs what the checkpoint reads.
    y = checkpoint(lambda y: y * model.seen, model[0](x), use_reentrant=False)
    model.seen.add_(1)
    return y


def _changes_what_it_reads(model, x):
    # The norm has statistics of the first time, and the input of the second one.
    def inner(y):
        model.seen.mul_(0.9)
        return F.batch_norm(y * model.seen.clone(), None, None, training=True)

    return checkpoint(inner, model[0](x), use_reentrant=False)


def _draws_anew(model, x):
    drawn = checkpoint(
        lambda x: x.sin() + torch.rand_like(x) + x.cos(), x, use_reentrant=False, preserve_rng_state=False
    )
    return model[0](drawn)


def _products(model, x):
    # matmul computes views in other pieces.
    return model[1](model[0](x).permute(0, 2, 3, 1))


@pytest.mark.parametrize("function", [_reads_a_buffer, _changes_what_it_reads, _draws_anew, _products])
def test_what_is_read_and_drawn_when_it_is_computed_again(P_world, function):
    class Model(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2, 3))
            self.register_buffer("seen", torch.ones(1))

        def forward(self, x):
            return function(self, x), self.seen.add_(1)

    torch.manual_seed(3)
    with Pair(Model(), {"H": -1}) as pair:

        def step(model, optimizer):
            (square(model(x)[0]) + square(model(x * 2)[0])).backward()
            optimizer.step()
            with torch.no_grad():
                return model(x)[0].std() + model(x)[1].sum()

        for _ in range(3):
            x = torch.rand(2, 1, 9, 6)
            pair.both(step)
        assert kinds(pair.models[1]) == [True, True]


class Again(nn.Sequential):
    """Parts of a model, of which a checkpoint saves the inputs alone."""

    def forward(self, x):
        for part in self:
            x = checkpoint(part, x, use_reentrant=False)
        return x


def deep(kind=Again):
    """Parts that draw numbers, change buffers, and save a tensor in each of their functions."""
    parts = [
        nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), norm, nn.ELU(), nn.Dropout(0.3), nn.Sigmoid())
        for n, norm in ((1, nn.BatchNorm2d(8)), (8, nn.GroupNorm(2, 8)), (8, nn.BatchNorm2d(8)))
    ]
    return kind(*parts, nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.Dropout2d(0.4), nn.LogSoftmax(1)))


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [2, 13])
def test_checkpoints_compute_their_forward_again(P_world, rows):
    torch.manual_seed(3)
    with Pair(deep()) as pair, Pair(deep(nn.Sequential)) as other:

        def step(model, optimizer):
            optimizer.zero_grad()
            first, second = model(x), model(x * 2)
            (square(second) + square(first)).backward()
            optimizer.step()
            return first.std()

        for at in range(4):
            torch.manual_seed(at)
            x = torch.rand(2, 1, rows, 12)
            with torch.autocast("cpu", enabled=at == 3):
                pair.both(step)
        (known, half), saved = pair.models[1]._compiled_call_impl.kinds, []
        assert (known.known, half.known) == (True, True)
        other.train(lambda: x)
        for model in (pair.models[1], other.models[1]):
            y = model(x)._local
            saved.append(sum(each.nbytes for each in y.grad_fn.saved_tensors if each is not None))
        # Inputs of parts, and what torch saves of random numbers; all results of functions.
        assert saved[0] < saved[1] / 2 + 20_000, saved


@pytest.mark.parametrize("what", ["bias", "random numbers"])
def test_a_backward_that_changes_more_than_gradients_is_compared(P_world, comm, monkeypatch, what):
    model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    model.bias.requires_grad_(requires_grad=False)
    true = Program.backward

    def wrong(*given):
        yield from true(*given)
        if comm.rank == 1:
            torch.rand(1) if what == "random numbers" else model.bias.data.add_(1)

    monkeypatch.setattr(Program, "backward", wrong)
    model.compile("replay")
    with pytest.raises(UnsupportedError, match=f"rank 1: .*{what}.* of a replay differs"):
        square(model(torch.rand(1, 1, 8, 6))).backward()
    monkeypatch.undo()
    square(model(torch.rand(1, 1, 8, 6))).backward()
    assert kinds(model) == [True]


def test_a_recording_keeps_no_result_that_the_call_does_not_keep(P_world):
    torch.manual_seed(3)
    model, most = distribute(nn.Conv2d(1, 2, 3, padding=1), {"H": -1}), bytearray(2)

    def step(x):
        y, storages = model(x), []
        for _ in range(5):
            y = y * 2
            storages.append(StorageWeakRef(y.to_local().untyped_storage()))
        most[:] = bytes([len(storages), max(most[1], sum(not each.expired() for each in storages))])
        return y.sum()

    with torch.no_grad():
        compiled = replayed(step)
        first, again = (compiled(torch.ones(1, 1, 9, 8)) for _ in range(2))
    assert torch.equal(first.to_local(), again.to_local())
    # What a bytearray holds is not seen.
    assert compiled.kinds[0].known and [*most] == [5, 1]
    model.distributed.close()

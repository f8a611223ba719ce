"""Ranks that call different things: an error on every rank that says who calls what."""

import re

import pytest
import torch
import torch.distributed as dist

from distdl_rma import MismatchError, UnsupportedError
from tests.process_group.backends import process_group

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3)]


def odd():
    return dist.get_rank() % 2


DIFFERENT = {
    "sizes": (
        lambda: dist.all_reduce(torch.ones(3 + odd())),
        ("all_reduce(sum) of 3 x float32", "all_reduce(sum) of 4 x float32"),
    ),
    "sizes of long tensors": (
        lambda: dist.all_reduce(torch.ones((3 + odd()) << 18)),
        ("all_reduce(sum) of 786432 x float32", "all_reduce(sum) of 1048576 x float32"),
    ),
    "types": (
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd() else torch.float32)),
        ("all_reduce(sum) of 4 x float32", "all_reduce(sum) of 4 x float64"),
    ),
    "reductions": (
        lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd() else dist.ReduceOp.SUM),
        ("all_reduce(sum) of 4 x float32", "all_reduce(max) of 4 x float32"),
    ),
    "order": (
        lambda: dist.barrier() if odd() else dist.broadcast(torch.ones(4), 0),
        ("broadcast from rank 0 of 4 x float32", "barrier"),
    ),
    "roots": (
        lambda: dist.broadcast(torch.ones(4), odd()),
        ("broadcast from rank 0 of 4 x float32", "broadcast from rank 1 of 4 x float32"),
    ),
    "what is waited for by a future": (
        lambda: dist.all_reduce(torch.ones(3 + odd()), async_op=True).get_future().wait(),
        ("all_reduce(sum) of 3 x float32", "all_reduce(sum) of 4 x float32"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_both_sides_of_a_difference_are_named_on_every_rank(comm, what):
    call, sides = DIFFERENT[what]
    with process_group(comm):
        # A future that C++ waits for says the same as text.
        with pytest.raises((MismatchError, RuntimeError)) as caught:
            call()
        mine, other = sides[comm.rank % 2], sides[1 - comm.rank % 2]
        said = f"group '.*': rank {comm.rank} calls {re.escape(mine)}, but rank \\d calls {re.escape(other)}"
        assert re.search(said, str(caught.value)), str(caught.value)
    # Another group has nothing to do with it.
    with process_group(comm):
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [comm.size] * 2


def test_a_difference_in_a_sub_group_names_the_group(comm):
    with process_group(comm):
        pair = dist.new_group([1, 0])
        if comm.rank < 2:
            with pytest.raises(MismatchError, match=rf"group '{pair.group_name}': rank {comm.rank} calls"):
                dist.all_reduce(torch.ones(3 + comm.rank), group=pair)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [comm.size] * 2


def test_what_is_sent_and_what_is_expected_must_fit(comm):
    with process_group(comm):
        if comm.rank < 2:
            with pytest.raises(MismatchError, match=r"16 bytes of torch\.float32 are sent, but 20 bytes"):
                dist.send(torch.ones(4), 1) if comm.rank == 0 else dist.recv(torch.ones(5), 0)
        comm.Barrier()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(3).to_sparse(), "tensors are dense"),
        (lambda: torch.ones(3, device="meta"), "on cpu"),
    ],
    ids=["sparse", "another device"],
)
def test_tensors_that_no_group_takes_are_refused_alike(comm, make, words):
    with process_group(comm):
        for name, call in {
            "all_reduce": lambda: dist.all_reduce(make()),
            "broadcast": lambda: dist.broadcast(make(), 0),
        }.items():
            with pytest.raises(UnsupportedError, match=f"{name} in group '.*': .*{words}"):
                call()
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [comm.size] * 2

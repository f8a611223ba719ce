"""Calls that do not fit: refused by all ranks, or an error on every rank that says who calls what."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from distdl_rma import ArgumentError, MismatchError, ShapeError, UnsupportedError
from distdl_rma.torch_backend.group import RmaProcessGroup
from tests.torch_backend.backends import options, process_group

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3)]


def odd():
    return dist.get_rank() % 2


# Calls of which ranks with even and odd numbers make different ones, and what they are called.
DIFFERENT = {
    "sizes": (lambda: dist.all_reduce(torch.ones(3 + odd())),
              ("all_reduce(sum) of 3 x float32", "all_reduce(sum) of 4 x float32")),
    "long sizes": (lambda: dist.all_reduce(torch.ones((3 + odd()) << 18)),
                   ("all_reduce(sum) of 786432 x float32", "all_reduce(sum) of 1048576 x float32")),
    "types": (lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd() else torch.float32)),
              ("all_reduce(sum) of 4 x float32", "all_reduce(sum) of 4 x float64")),
    "reductions": (lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd() else dist.ReduceOp.SUM),
                   ("all_reduce(sum) of 4 x float32", "all_reduce(max) of 4 x float32")),
    "order": (lambda: dist.barrier() if odd() else dist.broadcast(torch.ones(4), 0),
              ("broadcast from rank 0 of 4 x float32", "barrier")),
    "roots": (lambda: dist.broadcast(torch.ones(4), odd()),
              ("broadcast from rank 0 of 4 x float32", "broadcast from rank 1 of 4 x float32")),
    "what is waited for by a future": (
        lambda: dist.all_reduce(torch.ones(3 + odd()), async_op=True).get_future().wait(),
        ("all_reduce(sum) of 3 x float32", "all_reduce(sum) of 4 x float32")),
}  # fmt: skip


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


def test_what_is_sent_and_what_is_expected_must_fit_and_the_next_message_comes(comm):
    others = [(torch.zeros(5), "20 bytes"), (torch.zeros(2).double(), "16 bytes of torch.float64")]
    with process_group(comm):
        for out, words in others if comm.rank < 2 else ():
            with pytest.raises(MismatchError, match=f"16 bytes of torch.float32 are sent, but {words}"):
                dist.send(torch.ones(4), 1) if comm.rank == 0 else dist.recv(out, 0)
            x = torch.full((4,), 1.0 - comm.rank)
            dist.send(x, 1) if comm.rank == 0 else dist.recv(x, 0)
            assert x.tolist() == [1] * 4
        comm.Barrier()


# Calls of a group with six numbers, which all ranks refuse.
REFUSED = [
    (ShapeError, "one tensor per rank, got 2", lambda g, x: g.broadcast([x, x]),
     lambda g, x: g.allreduce([x, x])),
    (ShapeError, "a tensor for each of . ranks, got", lambda g, x: g.allgather([[x] * (g.size() + 1)], [x]),
     lambda g, x: g.reduce_scatter([x], [[x] * (g.size() + 1)])),
    (ShapeError, "this rank's tensor has 5 elements, entry . of its list 6",
     lambda g, x: g.allgather([[x] * g.size()], [x[1:]]),
     lambda g, x: g.reduce_scatter([x[1:]], [[x] * g.size()])),
    (ShapeError, "tensors are of one type, got torch.float32, torch.int32",
     lambda g, x: g.allgather([[x] * g.size()], [x.int()]),
     lambda g, x: g.reduce_scatter([x], [[x.int()] * g.size()])),
    (ShapeError, ". parts of 6 elements are not the",
     lambda g, x: g.all_gather_single(x.new_empty(6 * g.size() + 1), x),
     lambda g, x: g.reduce_scatter_single(x, x[1:])),
    (ShapeError, "is contiguous; call contiguous",
     lambda g, x: g.all_to_all_single(torch.ones(g.size(), 3), torch.ones(3, g.size()).t()),
     lambda g, x: g.all_gather_single(torch.ones(1, 3).expand(2 * g.size(), 3), x),
     lambda g, x: g.all_gather_single(torch.ones(2 * g.size(), 1).expand(2 * g.size(), 3), x),
     lambda g, x: g.all_gather_single(torch.ones(20).as_strided((2 * g.size(), 3), (1, 1)), x),
     lambda g, x: g.all_gather_single(torch.ones(2 * g.size(), 3, 1).permute(2, 1, 0), x)),
    (ShapeError, "an input and an output for each", lambda g, x: g.alltoall([x] * g.size(), [x])),
    (ShapeError, "5 rows are not equal parts for", lambda g, x: g.all_to_all_single(x[1:], x[1:])),
    (ShapeError, r"6 rows for . ranks, got numbers of rows \[6, 6",
     lambda g, x: g.all_to_all_single(x, x, [6] * (g.size() + 1), None)),
    (ShapeError, "band is of integers", lambda g, x: g.allreduce([x], ReduceOp.BAND)),
    (ShapeError, "an average of torch.int32", lambda g, x: g.allreduce([x.int()], ReduceOp.AVG),
     lambda g, x: g.reduce_scatter([x.int()], [[x.int()] * g.size()],
                                   options(ReduceScatterOptions, ReduceOp.AVG)),
     # Of one rank they would be copied first.
     lambda g, x: g.allreduce([x.int().view(2, 3).t() if g.rank() else x.int().view(2, 3)], ReduceOp.AVG)),
    (ShapeError, "in group .*: elements of a tensor that is filled share memory",
     lambda g, x: g.allreduce([x[:1].expand(6)]), lambda g, x: g.broadcast([x.view(6, 1).expand(6, 2)]),
     lambda g, x: g.allreduce([torch.ones(9).as_strided((3, 2), (1, 1))]),
     lambda g, x: g.recv([x[:1].expand(6)], 0, 0)),
    (ArgumentError, "in group .*: the root is a rank in the group, from 0 to ., got (-1|7)",
     lambda g, x: g.broadcast([x], options(BroadcastOptions, root=7)),
     lambda g, x: g.reduce([x], options(ReduceOptions, root=-1)),
     lambda g, x: g.gather([], [x], options(GatherOptions, root=7)),
     lambda g, x: g.scatter([x], [], options(ScatterOptions, root=-1))),
    (ArgumentError, "in group .*: the peer is a rank in the group, from 0 to ., got (-1|7)",
     lambda g, x: g.send([x], -1, 0), lambda g, x: g.recv([x], 7, 0)),
    (ArgumentError, "a tag is from 0 to", lambda g, x: g.send([x], 0, -1)),
    (UnsupportedError, "cannot be reduced", lambda g, x: g.allreduce([x.to(torch.float8_e5m2)])),
    (UnsupportedError, "tensors are dense", lambda g, x: g.allreduce([x.to_sparse()]),
     lambda g, x: g.broadcast([x.to_sparse()])),
    (UnsupportedError, "on cpu, got one on meta", lambda g, x: g.allreduce([x.to("meta")]),
     lambda g, x: g.broadcast([x.to("meta")])),
]  # fmt: skip


def test_what_does_not_fit_is_refused_by_all_and_the_group_goes_on(group):
    x = torch.ones(6)
    for kind, words, *calls in REFUSED:
        for call in calls:
            with pytest.raises(kind, match=words):
                call(group, x)
        group.broadcast([x]).wait()
        assert (x == 1).all()


def test_what_one_rank_refuses_is_told_to_the_others(machine, comm):
    odd, size = comm.rank == comm.size - 1, comm.size
    cases = {
        "dense": lambda g: g.allreduce([torch.ones(3).to_sparse() if odd else torch.ones(3)]),
        "on cpu": lambda g: g.broadcast([torch.ones(3, device="meta" if odd else "cpu")]),
        "parts of": lambda g: g.all_gather_single(torch.ones(3 * size), torch.ones(4 if odd else 3)),
    }
    for name, call in cases.items():
        group = RmaProcessGroup(machine.segments, machine.ranks, name, 10.0)
        kind = (UnsupportedError, ShapeError) if odd else MismatchError
        with pytest.raises(kind, match=f"in group '{name}'.*{name}"):
            call(group).wait()
        with pytest.raises(MismatchError):
            group.barrier().wait()
        group.shutdown()
        comm.Barrier()


def test_rows_that_one_rank_sends_and_another_does_not_expect_are_named(group):
    size, me = group.size(), group.rank()
    taken = [1] * (size - 1) + [1 + (me == 0)]
    with pytest.raises(MismatchError, match=rf"rank {size - 1} has 4 bytes for rank 0, which expects 8"):
        group.all_to_all_single(torch.ones(sum(taken)), torch.ones(size), taken, None).wait()

"""Movements as torch calls them: what is checked before anything is begun, by all ranks alike."""

import pytest
import torch

from distdl_rma.errors import MismatchError, ShapeError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def test_what_does_not_fit_is_refused_by_all_and_the_group_goes_on(group):
    size, x = group.size(), torch.ones(6)
    for call, words in (
        (lambda: group.broadcast([x, x]), "one tensor per rank, got 2"),
        (lambda: group.allgather([[x] * (size + 1)], [x]), f"a tensor for each of {size} ranks, got"),
        (lambda: group.allgather([[x] * size], [x[1:]]), "this rank has 5 elements, 6 are expected"),
        (lambda: group.allgather([[x] * size], [x.int()]), "tensors are of one type"),
        (lambda: group.all_gather_single(x.new_empty(6 * size + 1), x), f"{size} parts of 6 elements"),
        (lambda: group.alltoall([x] * size, [x] * (size - 1)), "an input and an output for each of"),
        (lambda: group.all_to_all_single(x, x, [6] * (size + 1), None), "6 rows for"),
    ):
        with pytest.raises(ShapeError, match=words):
            call()
    group.broadcast([x]).wait()
    assert (x == 1).all()


def test_several_tensors_at_a_time(group):
    me, size = group.rank(), group.size()
    mine = [torch.full((k,), float(me)) for k in (2, 5)]
    outs = [[torch.empty(k) for k in (2, 5)] for _ in range(size)]
    group.allgather_coalesced(outs, mine).wait()
    assert all((out == rank).all() for rank, some in enumerate(outs) for out in some)
    wholes = [torch.empty(k * size) for k in (2, 5)]
    group.all_gather_single_coalesced(wholes, mine).wait()
    for whole, k in zip(wholes, (2, 5), strict=True):
        assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(k))


@pytest.mark.sizes(2, 3)
def test_rows_that_one_rank_sends_and_another_does_not_expect_are_named(group):
    size, me = group.size(), group.rank()
    if size == 1:
        return
    x, y = torch.ones(size), torch.ones(size + (me == 0))
    taken = [1] * size
    taken[-1] += me == 0
    with pytest.raises(MismatchError, match=rf"rank {size - 1} has 4 bytes for rank 0, which expects 8"):
        group.all_to_all_single(y, x, taken, None).wait()

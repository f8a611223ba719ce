"""Blocks of coalesced calls, and errors within them."""

import pytest
import torch
import torch.distributed as dist

from distdl_rma import MismatchError
from tests.torch_backend.backends import process_group

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 3)]
DEVICES = [None, torch.device("cpu")]


def left(group=None, device=None):
    with dist._coalescing_manager(group, device):
        dist.all_reduce(torch.ones(3), group=group)
        raise OSError("disk on fire")


def mixed(size):
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.ones(size), torch.ones(1))


def coalesced(tensors, device, group=None):
    with dist._coalescing_manager(group, device, async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    works.wait()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_next_calls_do_what_they_say_after_an_error_in_a_block(comm, device):
    with process_group(comm):
        for group in (None, dist.new_group(range(comm.size)[::-1])):
            with pytest.raises(OSError, match="disk"):
                left(group, device)
            dist.all_reduce(x := torch.ones(2), group=group)
            assert x.tolist() == [comm.size] * 2
            coalesced(some := [torch.ones(2), torch.ones(5)], device, group)
            assert all((each == comm.size).all() for each in some)
            dist.broadcast(x := torch.full((3,), float(comm.rank)), 0, group=group)
            assert x.tolist() == [0] * 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_calls_of_several_kinds_are_refused_and_the_next_go_on(comm):
    with process_group(comm):
        with pytest.raises(RuntimeError, match="same type"):
            mixed(comm.size)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [comm.size] * 2


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_leaves_the_block_alone_is_named_by_its_next_call(comm):
    with process_group(comm):
        if comm.rank:
            with pytest.raises(MismatchError, match=r"calls all_reduce_coalesced\(sum\).*but rank 0 calls"):
                coalesced([torch.ones(3)], None)
        else:
            with pytest.raises(OSError, match="disk"):
                left()
            with pytest.raises(MismatchError, match=r"rank 0 calls all_reduce\(sum\) of 4 x float32, but"):
                dist.all_reduce(torch.ones(4))


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_block_are_over_and_right_when_each_of_them_is(comm):
    after, before, device = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, torch.device("cpu")
    with process_group(comm):
        for count in (3, 5):
            with dist._coalescing_manager(None, device, async_ops=True) as block:
                dist.isend(sent := torch.full((3,), float(comm.rank)), after)
                dist.irecv(received := torch.zeros(count), before)
            (work,) = block.works
            if count == 3:
                work.synchronize()
                assert received.tolist() == [before] * 3 and work.is_success() and work.exception() is None
                assert all(map(torch.equal, work.result(), (sent, received)))
                continue
            with pytest.raises(MismatchError, match=r"12 bytes of torch\.float32 are sent, but 20"):
                work.synchronize()
            while not work.is_completed():
                pass
            assert not work.is_success() and isinstance(work.exception(), MismatchError)
        comm.Barrier()


def test_other_backends_keep_what_torch_makes_of_it(comm):
    with process_group(comm, "gloo"):
        with pytest.raises(OSError, match="disk"):
            left()
        with pytest.raises(ValueError, match="non-empty op list"), dist._coalescing_manager():
            pass
        # gloo is still connecting where no collective was called.
        comm.Barrier()

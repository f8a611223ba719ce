"""Memory of results: owned by one tensor at a time, used again."""

import gc

import pytest
import torch

from distdl_rma.layers.memory import SMALLEST_NBYTES, Pool

LARGE = (SMALLEST_NBYTES // 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128], ids=str)
def test_results_are_tensors_of_their_own(dtype):
    pool = Pool()
    first, second = (pool.empty(LARGE, dtype) for _ in range(2))
    assert first.shape == LARGE
    assert first.dtype == dtype
    assert first.is_contiguous()
    assert not first._is_view()
    first.fill_(1)
    second.fill_(0)
    assert bool(first.all())
    assert not bool(second.any())


def test_memory_is_used_again_when_its_last_tensor_is_dead():
    pool = Pool()
    first = pool.empty(LARGE, torch.float32)
    address, part = first.data_ptr(), first[1:]
    del first
    gc.collect()
    # A view is still there.
    assert pool.empty(LARGE, torch.float32).data_ptr() != address
    del part
    gc.collect()
    assert address in {t.data_ptr() for t in [pool.empty(LARGE, torch.float32) for _ in range(2)]}


def test_what_autograd_keeps_is_not_used_again():
    pool = Pool()
    x = pool.empty(LARGE, torch.float32).fill_(3.0)
    weight = torch.ones(LARGE, requires_grad=True)
    y = (x * weight).sum()
    del x
    gc.collect()
    pool.empty(LARGE, torch.float32).fill_(7.0)
    y.backward()
    assert torch.equal(weight.grad, torch.full(LARGE, 3.0))


def test_idle_memory_is_limited_and_the_oldest_goes_first():
    nbytes = 2 * SMALLEST_NBYTES
    pool = Pool(limit=3 * nbytes)
    sizes = [nbytes, nbytes + 64, nbytes + 128]
    for size in (*sizes, 4 * nbytes):
        pool.empty((size,), torch.uint8)
        gc.collect()
        assert pool.idle_nbytes <= 3 * nbytes
    assert pool.idle_nbytes == sum(sizes[1:])


def test_small_results_come_from_torch():
    pool = Pool()
    pool.empty((3,), torch.float32)
    gc.collect()
    assert pool.idle_nbytes == 0

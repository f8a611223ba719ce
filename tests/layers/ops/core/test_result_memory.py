"""Memory that results of the library are made in."""

import gc
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch

from distdl_rma.layers.ops.core.result_memory import SMALLEST_NBYTES, ResultPool

LARGE = (SMALLEST_NBYTES // 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128], ids=str)
def test_results_are_tensors_of_their_own(dtype):
    pool = ResultPool()
    first, second = (pool.empty(LARGE, dtype) for _ in range(2))
    assert (first.shape, first.dtype) == (LARGE, dtype) and first.is_contiguous() and not first._is_view()
    first.fill_(1)
    second.fill_(0)
    assert bool(first.all()) and not bool(second.any())


def test_memory_is_used_again_when_its_last_tensor_is_dead():
    pool = ResultPool()
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
    pool = ResultPool()
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
    pool = ResultPool(limit=3 * nbytes)
    pool.empty((3,), torch.uint8)
    gc.collect()
    assert pool.idle_nbytes == 0, "small results come from torch"
    sizes = [nbytes, nbytes + 64, nbytes + 128]
    for size in (*sizes, 4 * nbytes):
        pool.empty((size,), torch.uint8)
        gc.collect()
        assert pool.idle_nbytes <= 3 * nbytes
    assert pool.idle_nbytes == sum(sizes[1:])


def test_memory_that_comes_back_on_another_thread_is_counted_right():
    nbytes = 2 * SMALLEST_NBYTES
    pool = ResultPool(limit=nbytes + 64)
    late = [np.empty(nbytes + 64, np.uint8)]

    class Interrupted(OrderedDict):
        """Another thread gives a block back while this one looks for one."""

        def get(self, key):
            found = super().get(key)
            while late:
                other = threading.Thread(target=pool._give_back, args=(late.pop(),))
                other.start()
                other.join(5)
                assert not other.is_alive()
            return found

    pool._give_back(np.empty(nbytes, np.uint8))
    pool._idle = Interrupted(pool._idle)
    taken = pool._take(nbytes)
    assert taken.nbytes == nbytes
    assert pool.idle_nbytes == sum(block.nbytes for blocks in pool._idle.values() for block in blocks) > 0

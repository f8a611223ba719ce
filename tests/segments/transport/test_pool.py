"""Pools of memory: arrays and tensors own what they lie in, and dead ones give it back."""

import gc
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch

from distdl_rma.segments.transport.pool import Pool

SHAPE, NBYTES = (1 << 16, 2), 1 << 19


def tensor(pool):
    return torch.from_numpy(pool.array(SHAPE, np.float32))


def address(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data


def test_arrays_have_memory_of_their_own_at_a_cache_line():
    pool = Pool()
    first, second = (pool.array(SHAPE, np.int64) for _ in range(2))
    assert first.shape == SHAPE and first.flags.c_contiguous and first.ctypes.data % 64 == 0
    first.fill(1)
    second.fill(0)
    assert first.all() and not second.any()
    assert pool.array((0, 3), np.int64).shape == (0, 3)


@pytest.mark.parametrize(
    ("make", "part_of"),
    [
        (tensor, lambda x: x[1:]),
        (lambda pool: pool.array(SHAPE, np.float32), lambda x: x[1:].view(np.int32).T),
    ],
    ids=["tensor", "array"],
)
def test_memory_is_used_again_when_its_last_view_is_dead(make, part_of):
    pool = Pool()
    first = make(pool)
    there, part = address(first), part_of(first)
    del first
    gc.collect()
    # A view is still there.
    assert address(make(pool)) != there
    del part
    gc.collect()
    assert there in {address(again) for again in [make(pool) for _ in range(2)]}


def test_what_autograd_keeps_is_not_used_again():
    pool = Pool()
    x = tensor(pool).fill_(3.0)
    weight = torch.ones(SHAPE, requires_grad=True)
    y = (x * weight).sum()
    del x
    gc.collect()
    tensor(pool).fill_(7.0)
    y.backward()
    assert torch.equal(weight.grad, torch.full(SHAPE, 3.0))


def test_idle_memory_is_limited_and_the_oldest_goes_first():
    pool = Pool(limit=3 * NBYTES)
    sizes = [NBYTES, NBYTES + 64, NBYTES + 128]
    for size in (*sizes, 4 * NBYTES):
        pool.array((size,), np.uint8)
        gc.collect()
        assert pool.idle_nbytes <= 3 * NBYTES
    assert pool.idle_nbytes == sum(sizes[1:])
    pool.drop_idle()
    assert pool.idle_nbytes == 0


def test_memory_that_comes_back_on_another_thread_is_counted_right():
    pool = Pool(limit=NBYTES + 64)
    late = [pool.array((NBYTES + 64,), np.uint8)]

    class Interrupted(OrderedDict):
        """Another thread gives a block back while this one looks for one."""

        def get(self, key):
            found = super().get(key)
            while late:
                other = threading.Thread(target=late.clear)
                other.start()
                other.join(5)
                assert not other.is_alive()
            return found

    pool.array((NBYTES,), np.uint8)
    pool._idle = Interrupted(pool._idle)
    taken = pool.array((NBYTES,), np.uint8)
    assert taken.nbytes == NBYTES
    assert pool.idle_nbytes == sum(block.nbytes for blocks in pool._idle.values() for block in blocks) > 0

"""Torch tensors and the words that carry them between ranks."""

import gc
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch

from distdl_rma import UnsupportedError, zero_volume_tensor
from distdl_rma.ops.core.tensors import (
    DTYPES,
    MAX_DIMS,
    SMALLEST_NBYTES,
    ResultPool,
    as_tensor,
    as_words,
    autocast,
    numpy_dtype,
    sum_dtype,
    trouble_with,
)

# torch says of one of its types that it is an experiment.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def values(dtype):
    return (10 * torch.rand(3, 4)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_carry_every_type_without_a_copy(dtype):
    x = values(dtype)
    words = as_words(x)
    assert words.dtype == numpy_dtype(dtype, "x") and words.itemsize == dtype.itemsize
    assert words.ctypes.data == x.data_ptr()
    back = as_tensor(words, dtype)
    assert back.dtype == dtype and back.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda x: x.conj().imag])
def test_lazy_conjugates_and_negatives_travel_as_their_values(make):
    x = make(torch.randn(3, dtype=torch.complex64))
    assert torch.equal(as_tensor(as_words(x), x.dtype), x.resolve_conj().resolve_neg())


def test_types_that_do_not_move_are_named():
    with pytest.raises(UnsupportedError, match=r"the halo: dtype torch\.quint8 is not supported"):
        numpy_dtype(torch.quint8, "the halo")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_a_type_that_torch_adds_and_that_is_no_shorter(dtype):
    wide = sum_dtype(dtype)
    x = values(dtype).to(wide)
    x += x
    assert wide.itemsize >= dtype.itemsize and sum_dtype(wide) == wide


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([1.0], "is of type list"),
        (torch.eye(2).to_sparse(), "has layout torch.sparse_coo"),
        (torch.empty(1, device="meta"), "is on device meta"),
        (torch.zeros((1,) * (MAX_DIMS + 1)), f"has {MAX_DIMS + 1} dimensions"),
    ],
)
def test_what_cannot_move_is_said(x, text):
    assert text in trouble_with(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_wrong_with_a_dense_tensor(dtype):
    assert trouble_with(torch.zeros((1,) * MAX_DIMS, dtype=dtype)) == ""


def test_autocast_casts_floating_points_and_nothing_else():
    given = torch.rand(2), torch.rand(2, dtype=torch.float64), torch.arange(2), None
    assert autocast(*given) == given
    with torch.autocast("cpu", torch.bfloat16):
        single, double, whole, none = autocast(*given)
    assert single.dtype == torch.bfloat16 and double is given[1] and whole is given[2] and none is None


def test_a_tensor_without_elements():
    x = zero_volume_tensor(3, torch.int16)
    assert (x.shape, x.dtype, as_words(x).dtype) == ((3, 0), torch.int16, np.int16)
    assert zero_volume_tensor().shape == (0,) and zero_volume_tensor(requires_grad=True).requires_grad


LARGE = (SMALLEST_NBYTES // 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128], ids=str)
def test_results_are_tensors_of_their_own(dtype):
    pool = ResultPool()
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
    sizes = [nbytes, nbytes + 64, nbytes + 128]
    for size in (*sizes, 4 * nbytes):
        pool.empty((size,), torch.uint8)
        gc.collect()
        assert pool.idle_nbytes <= 3 * nbytes
    assert pool.idle_nbytes == sum(sizes[1:])


def test_small_results_come_from_torch():
    pool = ResultPool()
    pool.empty((3,), torch.float32)
    gc.collect()
    assert pool.idle_nbytes == 0


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

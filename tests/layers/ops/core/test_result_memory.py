"""Memory that results of the library are made in."""

import gc

import pytest
import torch

from distdl_rma.layers.dtypes import memory_moves
from distdl_rma.layers.ops.core import result_memory
from distdl_rma.layers.ops.core.result_memory import SMALLEST_NBYTES, result, result_like

LARGE = (SMALLEST_NBYTES // 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128], ids=str)
def test_results_are_tensors_of_their_own(dtype):
    first, second = result(LARGE, dtype), result_like(torch.zeros(LARGE, dtype=dtype))
    for each in (first, second):
        assert (each.shape, each.dtype) == (LARGE, dtype) and each.is_contiguous() and not each._is_view()
    first.fill_(1)
    second.fill_(0)
    assert bool(first.all()) and not bool(second.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_results_use_the_memory_of_dead_ones_and_small_ones_that_of_torch(dtype):
    gc.collect()
    with result_memory.idle_memory(1 << 28):
        result((3,), dtype)
        assert result_memory._results.idle_nbytes == 0
        first = result(LARGE, dtype)
        address, part = first.data_ptr(), first[1:]
        del first
        assert result(LARGE, dtype).data_ptr() != address
        del part
        assert address in {each.data_ptr() for each in [result(LARGE, dtype) for _ in range(2)]}
        with result_memory.idle_memory(0):
            assert result_memory._results.idle_nbytes == 0
        with memory_moves():
            kept = result(LARGE, dtype)
            kept.untyped_storage().resize_(0)
            assert result_memory._results.idle_nbytes == 0

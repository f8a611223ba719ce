"""Torch tensors and the words that carry them between ranks."""

import numpy as np
import pytest
import torch

from distdl_rma import zero_volume_tensor
from distdl_rma.layers.dtypes import DTYPES, as_words, word_dtype
from distdl_rma.layers.ops.core.tensors import MAX_DIMS, as_tensor, problem_with

# torch says of one of its types that it is an experiment.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def values(dtype):
    return (10 * torch.rand(3, 4)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_carry_every_type_without_a_copy(dtype):
    x = values(dtype)
    words = as_words(x)
    assert words.dtype == word_dtype(dtype, "x") and words.itemsize == dtype.itemsize
    assert words.ctypes.data == x.data_ptr()
    back = as_tensor(words, dtype)
    assert back.dtype == dtype and back.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda x: x.conj().imag])
def test_lazy_conjugates_and_negatives_travel_as_their_values(make):
    x = make(torch.randn(3, dtype=torch.complex64))
    assert torch.equal(as_tensor(as_words(x), x.dtype), x.resolve_conj().resolve_neg())


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
    assert text in problem_with(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_wrong_with_a_dense_tensor(dtype):
    assert problem_with(torch.zeros((1,) * MAX_DIMS, dtype=dtype)) == ""


def test_a_tensor_without_elements():
    x = zero_volume_tensor(3, torch.int16)
    assert (x.shape, x.dtype, as_words(x).dtype) == ((3, 0), torch.int16, np.int16)
    assert zero_volume_tensor().shape == (0,) and zero_volume_tensor(requires_grad=True).requires_grad

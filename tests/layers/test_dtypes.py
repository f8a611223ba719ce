"""The table of the types of elements."""

import pytest
import torch

from distdl_rma import UnsupportedError
from distdl_rma.layers.dtypes import BIT_WORDS, DTYPES, NUMPY, digest, flat_bytes, sum_dtype, word_dtype

# torch says of one of its types that it is an experiment.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def test_types_that_do_not_move_are_named():
    with pytest.raises(UnsupportedError, match=r"the halo: dtype torch\.quint8 is not supported"):
        word_dtype(torch.quint8, "the halo")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_a_type_that_torch_adds_and_that_is_no_shorter(dtype):
    wide = sum_dtype(dtype)
    x = torch.ones(3).to(dtype).to(wide)
    x += x
    assert wide.itemsize >= dtype.itemsize and sum_dtype(wide) == wide


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpys_types_are_those_that_torch_gives_it(dtype):
    assert torch.zeros(1, dtype=dtype).numpy().dtype == NUMPY[dtype]


@pytest.mark.parametrize("nbytes", BIT_WORDS)
def test_words_have_their_size_in_torch_and_in_numpy(nbytes):
    torchs, numpys = BIT_WORDS[nbytes]
    assert torchs.itemsize == numpys.itemsize == nbytes
    assert NUMPY[torchs] == numpys


@pytest.mark.parametrize(
    "x", [torch.rand(5, 2).T, torch.rand(5, 2)[:1, 1], torch.rand(3)[1], torch.rand(0, 4)]
)
def test_bytes_are_those_of_the_elements_in_their_order(x):
    found = flat_bytes(x)
    assert found.is_contiguous() and bytes(found.tolist()) == x.numpy().tobytes()
    assert not x.is_contiguous() or found.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("change", [torch.neg, lambda x: x.flip(0), lambda x: x.roll(1), lambda x: x + 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 1 << 13, 1 << 16, (1 << 16) + 3])
def test_digests_of_other_values_differ(change, dtype, count):
    x = torch.arange(1, count + 1).to(dtype)
    assert digest(x) == digest(x.clone())
    assert (digest(x) == digest(change(x))) == torch.equal(x, change(x))

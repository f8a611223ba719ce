"""Tensors of a call as arrays; what a call cannot take is in ``test_bad_input.py``."""

import numpy as np
import pytest
import torch

from distdl_rma.torch_backend.tensors import Flat, facts, parts_of, rows_of


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3),
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(12.0).view(2, 6)[:, ::2],
        lambda: torch.arange(6.0).requires_grad_(),
        lambda: torch.complex(torch.arange(6.0), torch.ones(6)).conj(),
        lambda: torch.complex(torch.arange(6.0), torch.ones(6)).conj().imag,
        lambda: torch.tensor(3.0),
    ],
    ids=["contiguous", "transposed", "strided", "with a gradient", "conjugated", "negated", "a number"],
)
def test_what_is_written_to_the_array_is_in_the_tensor_once_it_is_stored(make):
    x = make()
    flat = Flat(x)
    expected = x.detach().resolve_conj().resolve_neg().reshape(-1)
    assert np.array_equal(flat.elements, expected.numpy())
    assert flat.bytes.size == x.numel() * x.itemsize
    flat.elements[:] = 7
    flat.store()
    assert (x == 7).all()


def test_floats_of_16_bits_are_words():
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([1.0, -2.0], dtype=dtype)
        assert Flat(x).elements.tolist() == x.view(torch.int16).tolist()


def test_sizes_and_types_read_short():
    x, y = torch.ones(3), torch.ones(2, dtype=torch.int64)
    assert facts([x]) == "3 x float32"
    assert facts([x, x]) == "2 times 3 x float32"
    assert facts([x, y]) == "3 x float32, 2 x int64"
    assert facts([x, y] * 3) == "3 x float32, 2 x int64, 3 x float32, ... (6, 15 in all)"


def test_parts_and_rows_are_views():
    whole = torch.arange(12.0)
    for part, mine in zip(parts_of(whole, torch.ones(4), 3, "me"), whole.split(4), strict=True):
        assert part.data_ptr() == mine.data_ptr()
        assert torch.equal(part, mine)
    table = whole.view(6, 2)
    assert [rows.shape[0] for rows in rows_of(table, None, 3, "me")] == [2, 2, 2]
    assert [rows.tolist() for rows in rows_of(table, [0, 5, 1], 3, "me")][2] == [[10, 11]]
    assert [part.numel() for part in parts_of(whole[:0], whole[:0], 3, "me")] == [0, 0, 0]

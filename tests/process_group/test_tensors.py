"""Tensors of a call as arrays, and what a call cannot take."""

import numpy as np
import pytest
import torch

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.process_group.tensors import Flat, check, check_alike, facts, parts_of, rows_of, single


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


def test_what_does_not_fit_says_who_and_what():
    x = torch.ones(6)
    for call, words in {
        lambda: single([x, x], "me"): "me: takes one tensor per rank, got 2",
        lambda: check_alike(
            [x, x.int()], "me"
        ): "me: tensors are of one type, got torch.float32, torch.int32",
        lambda: parts_of(x, torch.ones(4), 2, "me"): "me: 2 parts of 4 elements are not the 6 of the whole",
        lambda: parts_of(torch.ones(3, 2).t(), torch.ones(3), 2, "me"): "contiguous",
        lambda: rows_of(x, None, 4, "me"): "me: 6 rows are not equal parts for 4 ranks",
        lambda: rows_of(x, [1, 2], 2, "me"): r"6 rows for 2 ranks, got numbers of rows \[1, 2\]",
    }.items():
        with pytest.raises(ShapeError, match=words):
            call()
    for wrong, words in ((x.to_sparse(), "dense"), (x.to("meta"), "on cpu, got one on meta")):
        with pytest.raises(UnsupportedError, match=words):
            check([x, wrong], "me")

"""What may be assigned to a slice of a peer's array, and what would lose something."""

import array
import math

import numpy as np
import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.segments.memory.values import as_values


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (3, "uint8"), (True, "bool"), (True, "int8"), (3, "float32"), (0.1, "float32"), (1j, "complex64"),
        (3, ">i4"), (0.5, ">f8"), (np.int8(-1), "int64"), (np.float32(0.1), "float64"),
        (np.arange(3), "float64"), (np.arange(3, dtype=">i4"), "<i4"), (torch.ones(2), "float64"),
        (b"ab", "uint8"), (np.array([2**53, -(2**63)]), "float64"), (1 << 24, "float32"),
        (math.inf, "float16"), (np.array([2**63], "uint64"), "complex128"), ([1, 2], "float32"),
        ([[0.1], [2]], "float32"), ([], "int8"),
        (np.array(["2020-01-01", "NaT"], "M8[D]"), "M8[s]"),
    ],
)  # fmt: skip
def test_values_that_fit_are_taken(data, dtype):
    taken = as_values(data, np.dtype(dtype), "put")
    there = taken.astype(dtype)
    assert ((there == np.asarray(taken)) | (there != there)).all()


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (1.5, "int64"), (-1, "uint8"), (300, "uint8"), (1 << 70, "int64"), (1j, "float64"), (2, "bool"),
        (np.float64(0.1), "float32"), (np.int64(3), "int32"), (np.zeros(2), "int64"),
        (torch.ones(2), "int64"), (1, [("a", "i4")]), (array.array("d", [1.0]), "uint8"),
        (np.zeros(2, "U5"), "U3"), (np.array([2**53 + 1]), "float64"), (np.array([2**63 - 1]), "complex128"),
        (np.array([2**64 - 1], "uint64"), "float64"), (2**24 + 1, "float32"), (10**400, "float64"),
        (1e300, "float32"), (70000.0, "float16"), (70000, "float16"), (complex(0, 1e300), "complex64"),
        (np.arange(3), "S21"), (np.arange(3), "m8[s]"), (np.zeros(2, "S3"), "U3"), (3, "m8[s]"),
        (np.ma.array([1.0, 2.0], mask=[1, 0]), "float64"), ([1, 300], "uint8"), ([2**53 + 1, 0.5], "float64"),
        ([1e300], "float32"), ([[1], [2, 3]], "int64"), ([np.float64(0.1)], "float32"),
        (np.array(["9000000000-01-01"], "M8[D]"), "M8[ns]"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_values_that_would_lose_something_are_refused(data, dtype):
    with pytest.raises(ShapeError, match=r"put: .* fit into"):
        as_values(data, np.dtype(dtype), "put")


@pytest.mark.parametrize("data", [["a"], [None], [np.zeros(2)]])
def test_a_list_of_other_things_than_numbers_is_refused(data):
    with pytest.raises(ShapeError, match="got a list of"):
        as_values(data, np.dtype("float64"), "put")

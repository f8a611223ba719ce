"""What travels, and which bytes a slice means."""

import array
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from distdl_rma import ShapeError
from distdl_rma.segments.memory.array_bytes import ArrayLayout, as_bytes, as_target, as_values
from tests.segments.strategies import slices

DTYPES = ("uint8", ">i2", "float32", "int64", "complex128", "M8[s]", "U3", [("a", "<i4"), ("b", ">f8")])


@given(slices(), st.sampled_from(DTYPES), st.integers(0, 9))
def test_the_runs_of_a_slice_are_the_bytes_that_numpy_finds(shape_and_key, dtype, offset):
    shape, key = shape_and_key
    layout = ArrayLayout(dtype, shape)
    segment = np.random.default_rng(1).integers(0, 50, offset + layout.nbytes + 9).astype(np.uint8)
    whole = segment[offset : offset + layout.nbytes].view(layout.dtype).reshape(shape)
    part = layout.part(key)
    runs = part.runs(offset)
    # With an ellipsis also a single element is a view: as a number it would lose its byte order.
    meant = whole[key if ... in key else (*key, ...)]
    assert part.shape == meant.shape
    assert runs.total == part.nbytes == layout.dtype.itemsize * math.prod(part.shape)
    packed = b"".join(segment[at : at + runs.nbytes].tobytes() for at in runs.offsets)
    assert packed == meant.tobytes()


def test_what_is_contiguous_in_memory_is_one_run():
    part = ArrayLayout(np.float32, (4, 5, 6)).part((slice(1, 3),))
    assert part.runs(100).offsets == (100 + 4 * 30,) and part.runs(100).nbytes == 2 * 4 * 30
    assert len(ArrayLayout(np.float32, (4, 5, 6)).part((slice(1, 3), slice(0, 2))).runs(0).offsets) == 2


@pytest.mark.parametrize(
    "key", [None, True, np.True_, [0, 1], np.array([0]), 1.0, "a", 3, (0, 0, 0), slice(0, 1, 0), slice(0.5)]
)
def test_a_key_that_is_no_slice_of_the_shape_is_refused(key):
    with pytest.raises(ShapeError, match=r"integers and slices|does not fit a peer's array of shape"):
        ArrayLayout(np.int64, (3, 4)).part(key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_an_array_are_its_elements_in_row_major_order(dtype):
    data = np.zeros((3, 4), dtype)
    data.reshape(-1).view(np.uint8)[:] = np.arange(data.nbytes) % 48
    readonly = data.copy()
    readonly.flags.writeable = False
    for view in (
        data,
        readonly,
        data[::2],
        data.T,
        data[:, ::-1],
        np.asfortranarray(data),
        data[1, 2],
        data[:0],
    ):
        assert as_bytes(view, "put").tobytes() == view.tobytes()


def test_contiguous_data_is_not_copied():
    data = np.zeros(5)
    as_bytes(data, "put")[:] = np.ones(5).data.cast("B")
    assert (data == 1).all()
    tensor = torch.zeros(5)
    as_bytes(tensor, "put")[:] = torch.ones(5).numpy().data.cast("B")
    assert (tensor == 1).all()


def test_bytes_and_the_like_travel_as_they_are():
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a.b.c")[::2]):
        assert as_bytes(data, "put").tobytes() == b"abc"
    assert as_bytes(b"", "put").nbytes == 0
    assert as_bytes(array.array("d", [1.0, 2.0]), "put").tobytes() == np.array([1.0, 2.0]).tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("nonsense", 2), ("f4", "ab"), ("f4", (1.5,)), ("S", 2), ("V0", (2,)), (object, 1),
     ("i8", (-1,)), ("i8", (-1, -1)), ("i8", (2, -3))],
)  # fmt: skip
def test_a_layout_of_no_type_or_shape_is_refused(dtype, shape):
    with pytest.raises(ShapeError, match="no segment holds an array"):
        ArrayLayout(dtype, shape)
    assert ArrayLayout("f4", 2).shape == ArrayLayout("f4", [2]).shape == (2,)
    # Bytes of a huge shape do not wrap around.
    assert ArrayLayout(np.int64, (1 << 31, 1 << 31)).nbytes == 1 << 65


@pytest.mark.parametrize(
    ("take", "data", "words"),
    [
        (as_bytes, np.array([None]), "Python objects mean nothing to another process"),
        (as_bytes, np.zeros(2, [("a", "i4"), ("b", "O")]), "Python objects mean nothing"),
        *((as_bytes, data, f"a tensor or bytes, got {type(data).__name__}")
          for data in ([1, 2], 3, None, "text", {1: 2})),
        (as_bytes, torch.zeros(3, dtype=torch.bfloat16), "not an array that numpy can look at: .*BFloat16"),
        (as_bytes, torch.zeros(3, requires_grad=True), "numpy can look at: .*grad"),
        (as_bytes, torch.zeros(3, dtype=torch.complex64).conj(), "numpy can look at: .*conj"),
        (as_bytes, torch.zeros(3, device="meta"), "numpy can look at: .*meta"),
        *((as_target, out, "is read-only")
          for out in (b"abc", np.float64(1), np.broadcast_to(np.zeros(1), (3,)))),
        (as_target, [1, 2], "got list"),
    ],
)  # fmt: skip
def test_what_is_no_memory_is_refused_with_the_reason(take, data, words):
    with pytest.raises(ShapeError, match=rf"the call\b.*{words}"):
        take(data, "the call")


def test_a_target_is_the_memory_of_what_was_given():
    for out in (np.zeros(3), torch.zeros(3), bytearray(3), np.zeros((4, 4)).T[::2], memoryview(bytearray(3))):
        as_target(out, "get")[...] = 1
        assert all(np.asarray(out).reshape(-1) == 1)
    assert as_target(np.zeros((0, 3)), "get").size == 0


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
    with pytest.raises(ShapeError, match=r"put: .* (fit into|masked has no value)"):
        as_values(data, np.dtype(dtype), "put")


@pytest.mark.parametrize("data", [["a"], [None], [np.zeros(2)]])
def test_a_list_of_other_things_than_numbers_is_refused(data):
    with pytest.raises(ShapeError, match="got a list of"):
        as_values(data, np.dtype("float64"), "put")

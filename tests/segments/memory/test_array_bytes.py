"""What travels, and which arrays lie in a segment."""

import array

import numpy as np
import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.segments.memory.array_bytes import ArrayLayout, as_bytes, as_target

DTYPES = ("uint8", ">i2", "float32", "int64", "complex128", "M8[s]", "U3", [("a", "<i4"), ("b", ">f8")])


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
        (as_bytes, np.ma.array([1.0, 2.0], mask=[1, 0]), "what is masked has no value"),
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

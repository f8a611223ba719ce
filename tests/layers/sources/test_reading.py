"""A box of any source is what numpy slices out of the whole."""

from __future__ import annotations

import re
import sys
from itertools import product

import numpy as np
import pytest
import torch

from distdl_rma import ArgumentError, DataError, Partition, ShapeError, Sink, Source, open_array
from distdl_rma.geometry import Box, Decomposition
from distdl_rma.layers.sources.reading import label, read_box
from tests.layers.sources.formats import ARRAYS, FILES, OF, some
from tests.run_mpi import completed

# Even and uneven blocks, and with more ranks than elements.
CASES = [
    ((7,), (3,)), ((7,), (9,)), ((5, 18), (2, 2)), ((5, 18), (1, 7)), ((3, 20, 17), (2, 2, 3)),
    ((3, 5, 4), (1, 3, 5)),
]  # fmt: skip
BY_NAME = {"ids": lambda made: made.__name__}


def values(shape, dtype):
    return np.random.default_rng(len(shape)).integers(0, 200, shape).astype(dtype)


def boxes(shape, grid):
    """Blocks of a grid, of the whole array and of a crop of it."""
    ranks = tuple(range(int(np.prod(grid))))
    crops = [Box.of_shape(shape), Box(tuple((n // 3, n - n // 4) for n in shape))]
    for crop, rank in product(crops, ranks):
        block = Decomposition.balanced(Partition(ranks, grid, rank), crop.shape).box(rank)
        yield block.shift(crop.start).slices(Box.of_shape(shape))


@pytest.mark.parametrize("made", [*FILES, *ARRAYS], **BY_NAME)
def test_every_block_and_crop_of_a_source_is_numpys_in_memory_of_its_own(made, tmp_path):
    for number, (shape, grid) in enumerate(CASES):
        # Images have two dimensions.
        if made in some("tiff", "tiff, tiled") and len(shape) < 2:
            continue
        (folder := tmp_path / str(number)).mkdir()
        x = values(shape, "int16" if made in some("tiff", "nifti") else "float32")
        source = open_array(made(folder, x.copy()))
        assert tuple(source.shape) == shape
        for box in boxes(shape, grid):
            found = read_box(source, box)
            assert found.is_contiguous() and found.dtype == torch.from_numpy(x).dtype
            assert np.array_equal(found.numpy(), x[box])
            assert found.shape == x[box].shape
            found.zero_()


@pytest.mark.parametrize("made", FILES, **BY_NAME)
def test_steps_are_passed_on(made, tmp_path):
    x = values((9, 20), "float32")
    box = slice(1, 8, 3), slice(0, 19, 2)
    assert np.array_equal(read_box(open_array(made(tmp_path, x)), box).numpy(), x[box])


@pytest.mark.parametrize("dtype", [">f8", "<f2", "uint8", ">u2", "bool", "complex64", ">c16", "uint64"])
@pytest.mark.parametrize("made", some("npy", "hdf5", "hdf5, chunked", "memmap"), **BY_NAME)
def test_elements_come_in_native_order(made, dtype, tmp_path):
    x = values((6, 5), dtype)
    found = read_box(open_array(made(tmp_path, x)), (slice(1, 5), slice(2, 5)))
    assert found.numpy().dtype == x.dtype.newbyteorder("=")
    assert np.array_equal(found.numpy(), x[1:5, 2:5])


def test_bfloat16_of_another_package_is_torchs():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = values((6, 5), "float32").astype(ml_dtypes.bfloat16)
    found = read_box(x, (slice(1, 5), slice(2, 5)))
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.float().numpy(), x[1:5, 2:5].astype("float32"))


def test_an_array_that_the_slicing_made_is_not_copied_and_one_that_is_kept_is():
    made = []

    def read(box):
        found = np.ones((4, 4))
        made.append(found.ctypes.data)
        return found

    assert read_box(Source((4, 4), float, read), (slice(0, 4),) * 2).data_ptr() == made[0]
    kept = np.ones((4, 4))
    found = read_box(Source((4, 4), float, lambda box: kept), (slice(0, 4),) * 2)
    assert found.data_ptr() != kept.ctypes.data


def returning(found, dtype=float):
    return Source((4, 4), dtype, lambda box: found)


# What is read, an error and its words.
REFUSED = [
    *(
        (np.ones((4, 4)), box, ArgumentError, r"shape \(4, 4\)")
        for box in (np.s_[:2], np.s_[:, 1], np.s_[-1:2, :], np.s_[:5, :], np.s_[3:2, :], np.s_[3:0:-1, :])
    ),
    (
        returning(np.ones((2, 2))), np.s_[:2, 1:4], ShapeError,
        r"asked for \[0:2, 1:4\], of shape \(2, 3\), but got \(2, 2\)",
    ),
    (
        returning([[1.0, 2.0]], np.float32), np.s_[:1, :2], ShapeError,
        r"Source of torch\.float32: read\(\) returned torch\.float64",
    ),
    *(
        (np.zeros((4,), dtype), (slice(0, 2),), ShapeError, "torch does not have")
        for dtype in ("S3", "O", "M8[s]", "longdouble", [("a", "f4")])
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "box", "error", "words"), REFUSED)
def test_slices_that_do_not_fit_and_what_torch_does_not_have_are_refused(source, box, error, words):
    with pytest.raises(error, match=words):
        read_box(source, box if isinstance(box, tuple) else (box,))


def test_indices_of_a_tensorstore_begin_where_its_domain_begins():
    ts = pytest.importorskip("tensorstore")
    x = values((7, 5), "float32")
    whole = ts.array(x)
    moved = whole[ts.d[0].translate_to[100]]
    for view, wanted in ((whole[2:], x[2:]), (moved, x), (whole[1:, 2:4], x[1:, 2:4])):
        for box in (np.s_[0:3, 0:2], np.s_[1:5:2, 1:2]):
            assert np.array_equal(read_box(view, box).numpy(), wanted[box])


def test_a_source_of_a_function_is_not_asked_for_nothing():
    for dtype in (torch.bfloat16, np.int16):
        source = Source((4, 0), dtype, lambda box: pytest.fail("asked"))
        found = read_box(source, (slice(1, 3), slice(0, 0)))
        assert found.shape == (2, 0) and found.dtype == (dtype if dtype is torch.bfloat16 else torch.int16)


def test_a_sink_writes_boxes_and_is_finished_unless_it_failed():
    x, calls = np.zeros((4, 4)), []
    sink = Sink((4, 4), float, x.__setitem__, lambda: calls.append("finished"))
    with sink:
        sink[slice(0, 2), slice(1, 3)] = np.ones((2, 2))
    assert x.sum() == 4 and calls == ["finished"]
    with pytest.raises(ValueError, match="stop"), sink:
        raise ValueError("stop")
    assert calls == ["finished"]


# In a process of its own, with which the servers of multiprocessing end.
IN_OTHER_PROCESSES = """
import multiprocessing, pickle, sys
from distdl_rma import open_array
from distdl_rma.layers.sources.reading import read_box

def read(source, queue):
    queue.put(read_box(source, (slice(1, 3), slice(2, 9))).tolist())

if __name__ == "__main__":
    source = open_array(sys.argv[1])
    expected = read_box(source, (slice(1, 3), slice(2, 9))).tolist()
    assert read_box(pickle.loads(pickle.dumps(source)), (slice(1, 3), slice(2, 9))).tolist() == expected
    for way in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(way)
        queue = context.Queue()
        process = context.Process(target=read, args=(source, queue))
        process.start()
        assert queue.get(timeout=100) == expected, way
        process.join(60)
        assert process.exitcode == 0, way
"""


@pytest.mark.slow
@pytest.mark.parametrize("made", some("npy", "hdf5, chunked", "zarr 3", "netcdf"), **BY_NAME)
def test_other_processes_open_the_file_themselves(made, tmp_path):
    path = made(tmp_path, values((4, 20), "float32"))
    (tmp_path / "script.py").write_text(IN_OTHER_PROCESSES)
    done = completed([sys.executable, str(tmp_path / "script.py"), str(path)])
    assert done.returncode == 0, done.stderr


def test_messages_name_the_kind_of_an_array_or_its_file(tmp_path):
    for number, made in enumerate(ARRAYS):
        (folder := tmp_path / str(number)).mkdir()
        assert re.fullmatch(r"a [\w.]+|.*/x", label(made(folder, values((4, 20), "float32"))))
    assert label(open_array(OF["zarr 3"](tmp_path, values((4, 20), "float32")))).endswith("x.zarr")
    assert label(np.zeros(3)) == "a numpy.ndarray"


def test_a_damaged_chunk_is_an_error_with_the_file(tmp_path):
    path = OF["zarr 3"](tmp_path, values((4, 20), "float32"))
    for chunk in (path / "c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.zarr: reading .* failed"):
        read_box(open_array(path), (slice(0, 4), slice(0, 20)))

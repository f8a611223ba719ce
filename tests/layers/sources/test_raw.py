"""Boxes of plain files, by offset: read and written by short runs, by long ones, and piece by piece."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks.memory import peak_kib
from distdl_rma import ArgumentError, DataError, open_array
from distdl_rma.geometry.box import Box
from distdl_rma.layers.sources import raw
from distdl_rma.layers.sources.raw import RawArray
from distdl_rma.layers.sources.reading import read_box

SHAPES = [(), (40,), (6, 50), (4, 7, 9), (2, 3, 5, 8), (5, 1, 6)]


@pytest.fixture(params=[(1, 1 << 20), (16, 64), (1 << 20, 100), (1 << 20, 1 << 20)], ids=str)
def sizes(request, monkeypatch):
    """Runs and pieces of few bytes, so that small arrays have many."""
    monkeypatch.setattr(raw, "_RUN_NBYTES", request.param[0])
    monkeypatch.setattr(raw, "_PIECE_NBYTES", request.param[1])
    monkeypatch.setattr(raw, "_AT_A_TIME", 3)


def random_boxes(shape, count):
    random = np.random.default_rng(sum(shape))
    for _ in range(count):
        ends = [sorted(map(int, random.integers(0, n + 1, 2))) for n in shape]
        yield tuple(slice(*each) for each in ends)
    yield tuple(slice(0, n) for n in shape)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=4), st.data())
def test_runs_are_where_the_elements_of_the_box_are(extents, data):
    shape = [before + inside + behind for before, inside, behind in extents]
    box = Box(tuple((before, before + inside) for before, inside, _ in extents))
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    wanted = x[box.slices(Box.of_shape(shape))].reshape(-1)
    first = data.draw(st.integers(0, box.volume))
    last = data.draw(st.integers(first, box.volume))
    with patch.object(raw, "_AT_A_TIME", data.draw(st.integers(1, 5))):
        found = list(raw.runs(shape, box, first, last))
    for place, at, count in found:
        assert wanted[at : at + count].tolist() == list(range(place, place + count))
    assert [at for _, at, _ in found] == [*accumulate((n for *_, n in found), initial=first)][: len(found)]
    assert sum(count for *_, count in found) == last - first


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_hosts", [False, True])
def test_boxes_are_read_and_written_where_they_lie(shape, on_hosts, order, sizes, tmp_path):
    x = np.arange(np.prod(shape), dtype="<f8").reshape(shape)
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    array = open_array(tmp_path / "x.npy")
    assert isinstance(array, RawArray)
    array = replace(array, on_hosts=on_hosts)
    for number, box in enumerate(random_boxes(shape, 20)):
        assert np.array_equal(array[box], x[box])
        x[box] = number
        array[box] = x[box]
        assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def test_a_box_that_is_not_within_the_array_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", x := np.arange(80.0).reshape(4, 20))
    array = open_array(tmp_path / "x.npy")
    assert np.array_equal(array[:, 3:], x[:, 3:]) and np.array_equal(array[1::2, :5:3], x[1::2, :5:3])
    for box in (np.s_[:2], np.s_[1, :], np.s_[-2:, :], np.s_[1:4, -3:2], np.s_[:5, :], np.s_[::-1, :]):
        for call in (array.__getitem__, lambda box: array.__setitem__(box, 1)):
            with pytest.raises(ArgumentError, match=r"x\.npy has shape \(4, 20\)"):
                call(box)
    with pytest.raises(ArgumentError, match=r"written without steps, got \[0:4:2, 0:20\]"):
        array[::2, :] = 1
    with pytest.raises(ValueError, match="could not be broadcast"):
        array[:, :] = np.zeros((2, 20))
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)
    array[1:3, :] = x[0] = x[1:3] = 5
    array[0:1, :] = [5] * 20
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def test_a_box_of_long_runs_reads_its_bytes_and_no_more(tmp_path):
    x = np.zeros((8, 1024, 1024), np.float32)
    np.save(tmp_path / "x.npy", x)
    array = open_array(tmp_path / "x.npy")
    # The first call imports.
    read_box(array, np.s_[0:1, 0:1024, 0:1024])
    for box in (np.s_[2:4, 0:1024, 0:1024], np.s_[0:8, 100:356, 0:1024]):
        before = bytes_read()
        found = read_box(array, box)
        # What is asked of /proc itself is read as well.
        assert found.nbytes <= bytes_read() - before <= found.nbytes + 8192


def bytes_read():
    return int(Path("/proc/self/io").read_text().split("\n", 1)[0].split()[1])


@pytest.mark.parametrize("dim", [0, 1])
def test_reading_needs_no_more_memory_than_the_box(dim, tmp_path):
    # Above what a process may map: the file is larger than that.
    np.save(tmp_path / "x.npy", np.ones((4096, 8192), np.float32))
    array, box = open_array(tmp_path / "x.npy"), [slice(0, 4096), slice(0, 8192)]
    box[dim] = slice(0, box[dim].stop // 2)
    assert peak_nbytes(lambda: read_box(array, box)) < 1.3 * (64 << 20)


def peak_nbytes(call):
    """Most resident memory during a call, above that before it."""
    return peak_kib(call, steps=1) << 10


@pytest.mark.parametrize("on_hosts", [False, True])
def test_writers_of_boxes_that_share_pages_do_not_disturb_each_other(on_hosts, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((64, 300), np.float32))
    array = replace(open_array(tmp_path / "x.npy"), on_hosts=on_hosts)

    def write(column):
        for _ in range(20):
            array[slice(0, 64), slice(column, column + 100)] = np.full((64, 100), column + 1, np.float32)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, (0, 100, 200)))
    assert np.array_equal(np.load(tmp_path / "x.npy")[0, ::100], [1, 101, 201])
    assert np.ptp(np.load(tmp_path / "x.npy"), axis=0).max() == 0


def test_a_truncated_file_is_refused_when_it_is_opened_or_read(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((64, 8192), np.float32))
    array = open_array(tmp_path / "x.npy")
    os.truncate(tmp_path / "x.npy", 1 << 20)
    with pytest.raises(DataError, match=r"x\.npy: has 1048576 bytes.* the file is truncated"):
        open_array(tmp_path / "x.npy")
    for columns, words in ((8192, "ends within the array"), (20, "truncated")):
        with pytest.raises(DataError, match=words):
            read_box(array, (slice(0, 64), slice(0, columns)))


def npy(path, header, version=1, length=None):
    text = header.encode() + b" " * 20 + b"\n"
    size = len(text) if length is None else length
    begin = bytes((version, 0)) + size.to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + begin + text)
    return path


@pytest.mark.parametrize(
    ("kind", "shape", "version", "length", "words"),
    [
        ("<f4", (0, 4), 9, None, r"version \(9, 0\) of the format"),
        ("<f4", (0, 4), 2, 0xFFFFFFF0, "a header of 4294967280 bytes"),
        ("|V0", (4,), 1, None, r"elements of type \|V0 are no numbers"),
        ("<U0", (4,), 1, None, "are no numbers"),
        ("<f4", (0,) * 65, 1, None, "dimension"),
        ("<f4", (0, 1 << 62), 1, None, "too big"),
    ],
)
def test_headers_of_arrays_that_numpy_does_not_have_are_refused(
    kind, shape, version, length, words, tmp_path
):
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}"
    with pytest.raises(DataError, match=rf"x\.npy.*{words}"):
        open_array(npy(tmp_path / "x.npy", header, version, length))

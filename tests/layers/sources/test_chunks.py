"""What chunks cost."""

from __future__ import annotations

import warnings
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from distdl_rma import Partition, Source
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.sources.chunks import chunks_of, warn_of_chunks
from tests.layers.sources.formats import OF


def source(shape, chunks):
    return Source(shape, np.float32, lambda box: np.zeros(shape)[box], chunks)


def said(shape, chunks, grid, rank=0):
    """The warning, empty if there is none."""
    ranks = tuple(range(int(np.prod(grid))))
    layout = Decomposition.balanced(Partition(ranks, grid, rank), shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_chunks(source(shape, chunks), layout, stacklevel=1)
    assert all(each.filename == __file__ for each in caught)
    return "".join(str(each.message) for each in caught)


def fetched(shape, chunks, grid):
    """Elements of the chunks that all ranks touch, by trying, against those of their blocks."""
    ranks, total = tuple(range(int(np.prod(grid)))), 0
    ends = [
        list(np.cumsum(c)) if isinstance(c, tuple) else [*range(c, n, c), n]
        for c, n in zip(chunks, shape, strict=True)
    ]
    for rank in ranks:
        box = Decomposition.balanced(Partition(ranks, grid, rank), shape).box(rank)
        total += prod(
            sum(b - a for a, b in pairwise([0, *stops]) if max(a, start) < min(b, stop))
            for (start, stop), stops in zip(box.bounds, ends, strict=True)
        )
    return total / prod(shape)


@pytest.mark.parametrize(
    ("shape", "chunks", "grid"),
    [
        ((64, 64), (64, 64), (2, 2)), ((64, 64), (8, 64), (1, 4)), ((10, 64), (3, 16), (4, 3)),
        ((64, 20), ((60, 4), (20,)), (3, 1)), ((3, 64), (1, 64), (5, 3)),
    ],
)  # fmt: skip
def test_the_warning_says_how_much_is_fetched(shape, chunks, grid):
    factor = fetched(shape, chunks, grid)
    text = said(shape, chunks, grid)
    assert (f"fetch {factor:.2f} times" in text) == (factor > 1.5)


def test_there_is_no_warning_without_a_reason_and_on_one_rank_only():
    for case in (((64, 64), (16, 16), (4, 1)), ((64, 64), None, (8, 8)), ((0, 64), (1, 64), (1, 8))):
        assert said(*case) == ""
    assert said((64, 64), (64, 64), (2, 2), rank=1) == ""


def test_the_dimensions_whose_cuts_meet_chunks_are_named():
    assert "cut other dimensions than [1], or" in said((64, 64), (16, 64), (1, 4))
    assert "(16, 64)" in said((64, 64), (64, 64), (4, 1))


def test_chunks_are_those_of_the_library(tmp_path):
    import xarray

    x = np.zeros((4, 6), np.float32)
    for number, name in enumerate(OF):
        (folder := tmp_path / str(number)).mkdir()
        if name in ("hdf5 dataset", "zarr array", "tensorstore", "dask"):
            assert chunks_of(OF[name](folder, x)) == (((2, 2), (2, 2, 2)) if name == "dask" else (2, 2))
        if name in ("xarray", "tensor", "memmap", "netcdf variable"):
            assert chunks_of(OF[name](folder, x)) is None
    path = OF["netcdf, chunked"](tmp_path, x)
    with xarray.open_dataset(path, engine="netcdf4", drop_variables="d0") as data:
        assert chunks_of(data["x"]) == (2, 2)

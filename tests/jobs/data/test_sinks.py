"""Split tensors that are written by blocks: the array is that of one process, or there is none."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr

from distdl_rma import (
    ArgumentError,
    DataError,
    MismatchError,
    ProtocolError,
    ShapeError,
    Sink,
    UnsupportedError,
    create_array,
    open_array,
    shard,
    write_shards,
)
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.data.sinks import ArraySink, _block_chunks, _in_chunks, aligned
from tests.handles import files_up_to
from tests.layers.sources.formats import whole
from tests.private_memory import run_alone

GRIDS = {
    1: [(1,)],
    2: [(2,), (2, 1), (2, 1, 1)],
    3: [(3,), (1, 3, 1), (3, 1, 1)],
    4: [(2, 2), (1, 2, 2), (4, 1, 1)],
}
NAMES = ["x.npy", "x.h5", "x.zarr"]
FILES = [*((n, None) for n in NAMES), ("x.hdf5::deep/x", None), ("x.zarr", (2, 3, 4))]


def refused(error, words, array):
    """The context of an array is not entered."""
    with pytest.raises(error, match=words), array:
        pytest.fail("entered")


def unwritten(box, values):
    pytest.fail("written")


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize(("name", "chunks"), FILES)
def test_what_is_written_is_the_whole_tensor_at_its_place(name, chunks, folder, comm, P_world):
    x = np.random.default_rng(0).normal(size=(3, 7, 10)).astype(np.float32)
    for number, grid in enumerate(GRIDS[comm.size]):
        path = folder / f"{number}-{name}"
        y = shard(grid, torch.from_numpy(x).requires_grad_())
        with create_array(path, (4, 9, 21), like=y, chunks=chunks) as sink:
            write_shards(sink, y, at=(1, 2, 0))
            write_shards(sink, z := 2 * y, at=(1, 2, 11))
            assert not Path(str(path).partition("::")[0]).exists()
        # Its graph stays.
        z.sum().backward()
        assert torch.equal(y.to_local().grad, torch.full_like(y.to_local(), 2))
        expected = np.zeros((4, 9, 21), np.float32)
        expected[1:, 2:, :10], expected[1:, 2:, 11:] = x, 2 * x
        assert np.array_equal(whole(path), expected)
        assert not Path(f"{str(path).partition('::')[0]}.part").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float64", "uint8", "bool", "complex64", "float16", ">f4"])
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_of_numpy_in_any_byte_order_can_be_written(dtype, name, folder, comm, P_world):
    dtype = getattr(torch, dtype, dtype)
    x = (10 * torch.rand(4, 6)).to(torch.float32 if dtype == ">f4" else dtype)
    y = shard((1, comm.size), x)
    with create_array(folder / name, (4, 6), dtype, like=y) as sink:
        # For torch a conjugate is a bit of the tensor.
        write_shards(sink, y.conj())
    assert np.array_equal(whole(folder / name), x.numpy().conj())
    # Zarr says the order of the memory.
    assert dtype != ">f4" or open_array(folder / name).dtype == ("<f4" if name == "x.zarr" else ">f4")


@pytest.mark.mpi
@pytest.mark.sizes(1)
@pytest.mark.parametrize(("name", "chunks"), FILES)
def test_a_box_is_that_of_numpy_or_refused(name, chunks, folder, comm, P_world):
    y, expected = shard((1, 1, comm.size), torch.zeros(4, 6, 8)), np.zeros((4, 6, 8), np.float32)
    boxes = [(np.s_[:, 1:5, 2:], np.arange(6.0)), (np.s_[1:2, :, :3], 7), (np.s_[2:2, :, :], 8)]
    with create_array(folder / name, (4, 6, 8), like=y, chunks=chunks) as sink:
        for box, values in boxes:
            expected[box] = values
            if comm.rank == 0:
                sink[box] = values
        for box in (np.s_[:2], np.s_[0, :, :], np.s_[-2:4, :, :], np.s_[:, :, :9]):
            with pytest.raises(ArgumentError, match=r"has shape \(4, 6, 8\)"):
                sink[box] = 1
        with pytest.raises(ValueError, match="could not be broadcast"):
            sink[:, :, :] = np.zeros((2, 6, 8))
    assert np.array_equal(whole(folder / name), expected)


@pytest.mark.mpi(min_size=2)
def test_arrays_and_places_that_differ_between_ranks_are_refused(folder, comm, P_world):
    y = shard((1, comm.size), torch.zeros(4, 6))
    words = r"array: .*\[4, 6\].* on rank 0, but .*\[4, 7\].* on rank 1"
    refused(MismatchError, words, create_array(folder / "x.npy", (4, 6 + comm.rank), like=y))
    assert not list(folder.iterdir())
    words = r"at: \[0, 0\] on rank 0, but \[0, 1\] on rank 1; all ranks write one tensor"
    with pytest.raises(ShapeError, match=words):
        write_shards(Sink((4, 20), np.float32, unwritten), y, at=(0, comm.rank))


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_empty_blocks_and_copies_are_written_once(name, folder, comm, P_world):
    x = torch.arange(6.0).reshape(1, 6)
    tensors = shard((comm.size, 1), x), shard((1, comm.size), x).redistribute(), shard((1, comm.size), x[:0])
    for number, y in enumerate(tensors):
        with create_array(folder / f"{number}{name}", y.shape, like=y) as sink:
            write_shards(sink, y)
        assert np.array_equal(whole(folder / f"{number}{name}"), x.numpy()[: len(y)])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shards", [None, (4, 8)])
def test_two_ranks_never_write_one_chunk(shards, folder, comm, P_world):
    if comm.rank == 0:
        how = {"chunks": (4, 4), "shards": shards, "dtype": "f4", "fill_value": 0}
        zarr.create_array(str(folder / "x.zarr"), shape=(8, 22), **how)
    comm.Barrier()
    array, written = zarr.open(str(folder / "x.zarr"), mode="r+"), []

    class Watched:
        shape, dtype, chunks = array.shape, array.dtype, array.chunks

        def __setitem__(self, box, values):
            written.append([(each.start, each.stop) for each in box])
            array[box] = values

    Watched.shards = array.shards
    x = np.random.default_rng(0).normal(size=(7, 21)).astype(np.float32)
    for grid in ((comm.size, 1), (1, comm.size)):
        written.clear()
        write_shards(Watched(), shard(grid, x), at=(1, 0))
        chunks = set()
        for box in written:
            edges = zip(box, shards or (4, 4), strict=True)
            chunks |= set(product(*(range(a // n, -(-b // n)) for (a, b), n in edges)))
        everywhere = [chunk for each in comm.allgather(chunks) for chunk in each]
        assert len(everywhere) == len(set(everywhere)) > 0
        assert np.array_equal(array[1:, :21], x)
        comm.Barrier()


@pytest.mark.mpi
def test_sinks_of_users_and_libraries_are_written(folder, comm, P_world):
    x = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)
    y, boxes = shard((1, comm.size), x), []
    with Sink((6, 12), torch.float32, lambda box, values: boxes.append((box, values.copy()))) as sink:
        write_shards(sink, y, at=(0, 2))
    ((box, values),) = boxes
    assert np.array_equal(np.pad(x, ((0, 0), (2, 0)))[box], values)
    if comm.rank == 0:
        np.save(folder / "x.npy", np.zeros((6, 10), np.float32))
    comm.Barrier()
    write_shards(np.load(folder / "x.npy", mmap_mode="r+"), y)
    assert np.array_equal(np.load(folder / "x.npy"), x)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / "t")}}
    if comm.rank == 0:
        metadata = {"shape": [6, 10], "chunks": [3, 4], "dtype": "<f4"}
        tensorstore.open({**spec, "metadata": metadata}, create=True).result()
    comm.Barrier()
    array = tensorstore.open(spec).result()
    write_shards(array, y)
    comm.Barrier()
    assert np.array_equal(tensorstore.open(spec).result().read().result(), x)


def created(name, shape=(4, 6), dtype=None, **options):
    return lambda y, folder: create_array(folder / name, shape, dtype, **{"like": y} | options)


def written(make):
    return lambda y, folder: write_shards(make(folder), y)


def mapped(mode):
    def make(folder):
        np.save(folder.parent / "own.npy", np.zeros((4, 6), np.float32))
        return np.load(folder.parent / "own.npy", mmap_mode=mode)

    return make


def in_memory(folder):
    spec = {"driver": "zarr3", "kvstore": "memory://"}
    return tensorstore.open(spec, create=True, dtype="float32", shape=(4, 6)).result()


SINK, ZEROS = Sink((4, 8), np.float32, unwritten), np.zeros((4, 6), np.float32)
# An error, its words, and a call with a split tensor and a folder.
REFUSED = [
    *(
        (ShapeError, "does not lie in", lambda y, _, at=at: write_shards(SINK, y, at=at))
        for at in ((0, 3), (1, 0), (-1, 0), (0,), (0, 0.5))
    ),
    (ShapeError, "elements of float32, the tensor of float64", lambda y, _: write_shards(SINK, y.double())),
    (ArgumentError, "takes a sink, then a split tensor", lambda y, _: write_shards(SINK, torch.zeros(4, 6))),
    (ArgumentError, r"for a path take create_array\(path, ", lambda y, _: write_shards(None, y)),
    (ArgumentError, r"for a path take create_array\(path, ", lambda y, folder: write_shards(str(folder), y)),
    (UnsupportedError, r"y\.float\(\)", created("x.npy", dtype=torch.bfloat16)),
    (ArgumentError, r"like= is a split tensor, got a torch", created("x.npy", like=torch.zeros(4, 6))),
    (ArgumentError, "shape has an integer for each dimension", created("x.npy", (4.0, 6))),
    (ArgumentError, "a dtype is of numpy or torch, got 'none'", created("x.npy", dtype="none")),
    (ArgumentError, r"writes \.npy", created("x.png")),
    (ArgumentError, "with a name behind", created("x.zarr::x")),
    (ArgumentError, "must have the 2 dimensions", created("x.npy", (4,))),
    (ArgumentError, "chunks= are of Zarr, one", created("x.npy", chunks=(2, 2))),
    (ArgumentError, "chunks= are of Zarr, one", created("x.zarr", chunks=(2, 0))),
    (ArgumentError, "chunks= are of Zarr, one", created("x.zarr", chunks=(2.5, 2))),
    (ArgumentError, "HDF5 are written contiguously", created("x.h5", chunks=(2, 2))),
    *(
        (ArgumentError, r"own\.npy is read only; open it by mode 'r\+'", written(mapped(mode)))
        for mode in ("r", "c")
    ),
    *(
        (ArgumentError, "in memory would get this rank's block only", written(make))
        for make in (
            lambda _: ZEROS,
            lambda _: torch.zeros(4, 6),
            lambda folder: mapped("r+")(folder).copy(),
            lambda _: zarr.zeros((4, 6), dtype="f4"),
            lambda _: tensorstore.array(ZEROS),
            in_memory,
            lambda _: xarray.DataArray(ZEROS),
        )
    ),
    (ProtocolError, "within its context", lambda y, folder: created("x.npy")(y, folder).__setitem__((), 1)),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(error, words, call, tmp_path, comm, P_world):
    (folder := tmp_path / "out").mkdir()
    with pytest.raises(error, match=words):
        call(shard((1, comm.size), torch.zeros(4, 6)), folder)
    assert not list(folder.iterdir())


@pytest.mark.mpi(min_size=2)
def test_several_ranks_do_not_write_an_open_variable_of_hdf5_or_netcdf(folder, comm, P_world):
    import h5py
    import netCDF4

    y = shard((1, comm.size), torch.zeros(4, 6))
    file, other = h5py.File(folder / f"{comm.rank}.h5", "w"), netCDF4.Dataset(folder / f"{comm.rank}.nc", "w")
    with file, other:
        for name, extent in (("y", 4), ("x", 6)):
            other.createDimension(name, extent)
        for sink in (file.create_dataset("x", (4, 6), "f4"), other.createVariable("v", "f4", ("y", "x"))):
            with pytest.raises(UnsupportedError, match="create_array"):
                write_shards(sink, y)


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_what_is_there_stays_there(name, folder, comm, P_world):
    y = shard((1, comm.size), torch.ones(4, 6))
    with create_array(folder / name, (4, 6), like=y) as sink:
        write_shards(sink, y)
    refused(DataError, "is there already", create_array(folder / name, (4, 6), like=y))
    assert whole(folder / name).sum() == 24


def write_and_stop(sink, y):
    write_shards(sink, y)
    raise ValueError("stop")


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_a_context_that_fails_leaves_nothing(name, folder, comm, P_world):
    y = shard((1, comm.size), torch.ones(4, 6))
    # A job that was killed has left this.
    if comm.rank == 0:
        (folder / f"{name}.part").write_text("half")
    with pytest.raises(ValueError, match="stop"), create_array(folder / name, (4, 6), like=y) as sink:
        write_and_stop(sink, y)
    comm.Barrier()
    assert not list(folder.iterdir())


def fill_disk(sink, y):
    with files_up_to(10):
        write_shards(sink, y)


def stop_first_rank_early(sink, y):
    if y.partition.me == 0:
        raise OSError("stop")
    time.sleep(0.3)
    sink[slice(60, 64), slice(60, 64)] = np.ones((4, 4), np.float32)
    raise OSError("later")


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("fail", [fill_disk, stop_first_rank_early])
def test_chunks_that_are_written_while_a_context_fails_do_not_stay(fail, folder, comm, P_world):
    y = shard((1, comm.size), torch.rand(64, 64))
    sink = create_array(folder / "x.zarr", (64, 64), like=y, chunks=(4, 4))
    # The first rank may remove the folder in the middle of a write of another one.
    with pytest.raises(OSError, match=r"stop|later|too large|No such file"), sink:
        fail(sink, y)
    comm.Barrier()
    assert not list(folder.iterdir())


def test_chunks_of_a_view_of_a_tensorstore_are_counted_from_the_first_of_its_array():
    ts, spec = tensorstore, {"driver": "zarr", "kvstore": {"driver": "memory"}}
    layout = ts.ChunkLayout(chunk_shape=(4, 3))
    whole = ts.open(spec, dtype=ts.float32, shape=(9, 6), create=True, chunk_layout=layout).result()
    assert _in_chunks(whole, (0, 0)) == ([0, 0], (4, 3), [9, 6])
    assert _in_chunks(whole[1:], (2, 0)) == ([3, 0], (4, 3), [9, 6])
    assert _in_chunks(whole[1:][ts.d[0].translate_to[0]], (2, 0)) == ([3, 0], (4, 3), [9, 6])


@pytest.mark.mpi
def test_a_folder_that_is_missing_is_an_error_on_all_ranks(folder, comm, P_world):
    y = shard((1, comm.size), torch.ones(4, 6))
    if comm.rank == 0:
        (folder / "file").touch()
    comm.Barrier()
    for place, words in (("no", "no: not found on"), ("file", "(?i)not a directory|no such file")):
        for name in NAMES:
            refused(DataError, words, create_array(folder / place / name, (4, 6), like=y))


@pytest.mark.mpi(min_size=2)
def test_a_write_that_fails_on_one_rank_fails_on_all(comm, P_world):
    def write(box, values):
        if comm.rank == 1:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"rank 1: OSError: .*No space left"):
        write_shards(Sink((4, 6), np.float32, write), shard((1, comm.size), torch.ones(4, 6)))


@pytest.mark.mpi
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_file_above_the_limit_is_an_error_on_all_ranks_before_data_moves(name, folder, comm, P_world):
    y = shard((1, comm.size), torch.ones(4, 6))
    with files_up_to(1 << 16):
        refused(DataError, "File too large", create_array(folder / name, (400, 600), like=y))
    comm.Barrier()
    assert not list(folder.iterdir())


FULL = """
import os, numpy as np, torch
from mpi4py import MPI
from distdl_rma import DataError, Machine, create_array, shard, write_shards
comm = MPI.COMM_WORLD
with Machine(comm, segment_size="4MiB") as machine:
    x = torch.rand(4, 1 << 20)
    y = shard(machine.partition((1, comm.size)), x)
    for name in ("x.npy", "x.h5", "x.zarr"):
        try:
            with create_array(f"/dev/shm/{name}", (40, 1 << 20), like=y) as sink:
                for row in range(0, 40, 4):
                    write_shards(sink, y, at=(row, 0))
        except DataError as error:
            assert "No space left" in str(error), error
        else:
            raise SystemExit(f"{name} was written")
        comm.Barrier()
        assert not [each for each in os.listdir("/dev/shm") if each.startswith("x.")], os.listdir("/dev/shm")
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing():
    done, _ = run_alone(2, FULL, size="64m")
    assert done.returncode == 0, done.stderr


def test_blocks_end_where_chunks_end_and_hold_all():
    random = np.random.default_rng(0)
    for _ in range(300):
        extents = tuple(map(int, random.integers(1, 30, 2)))
        grid = tuple(map(int, random.integers(1, 5, 2)))
        start = tuple(map(int, random.integers(0, 9, 2)))
        shape = tuple(a + n + int(random.integers(0, 9)) for a, n in zip(start, extents, strict=True))
        chunks = tuple(map(int, random.integers(1, 12, 2)))
        ranks = tuple(range(grid[0] * grid[1]))
        found = aligned(Decomposition.balanced(Partition(ranks, grid, 0), extents), start, chunks, shape)
        assert found.shape == extents
        seen = {}
        for rank in ranks:
            for d, (a, b) in enumerate(found.box(rank).bounds):
                touched = range((start[d] + a) // chunks[d], -(-(start[d] + b) // chunks[d]))
                for chunk in touched if b > a else ():
                    seen.setdefault((d, chunk), set()).add((a, b))
        assert all(len(each) == 1 for each in seen.values())


def test_chunks_are_blocks_or_divide_them():
    assert _block_chunks((8, 32), (8, 64), 4) == (8, 32)
    chunks = _block_chunks((1024, 1024, 512), (1024, 1024, 1024), 4)
    assert np.prod(chunks) * 4 == 16 << 20
    assert not any(n % chunk for n, chunk in zip((1024, 1024, 512), chunks, strict=True))


MADE = {
    "axes": "czyx", "spacing": (1, 2, 0.5, 0.25), "origin": (0, 1, 2, 3),
    "units": (None, "micrometer", "micrometer", "micrometer"),
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("given", [{}, MADE, {"axes": ("t", "z", "y", "x")}, {"spacing": (1, 2, 3, 4)}])
@pytest.mark.parametrize("name", ["y.ome.zarr", "y.zarr", "y.h5"])
def test_axes_spacing_origin_and_units_are_read_as_they_were_written(name, given, folder, comm, P_world):
    x = torch.arange(2.0 * 7 * 10 * 5).reshape(2, 7, 10, 5)
    y = shard((1, comm.size, 1, 1), x)
    with create_array(folder / name, x.shape, like=y, **given) as sink:
        write_shards(sink, y)
    found = open_array(folder / name)
    expected = {one: given[one] and tuple(given[one]) if one in given else None for one in MADE}
    if name == "y.ome.zarr":
        # OME-Zarr always has names and scales.
        plain = {"axes": tuple("czyx"), "spacing": (1.0,) * 4, "origin": (0.0,) * 4, "units": None}
        expected = {one: expected[one] or plain[one] for one in MADE}
        models = pytest.importorskip("ome_zarr_models.v05.image")
        image = models.Image.from_zarr(zarr.open_group(str(folder / name), mode="r"))
        assert image.attributes.ome.multiscales[0].ndim == 4
    assert {one: getattr(found, one) for one in MADE} == expected
    assert np.array_equal(whole(folder / name), x)
    sink = ArraySink(folder / f"{comm.rank}-{name}", x.shape, x.dtype, x.shape, **given)
    with sink:
        sink[tuple(slice(0, n) for n in x.shape)] = x.numpy()
    assert open_array(sink.path).spacing == found.spacing


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3)
def test_axes_of_one_rank_that_are_wrong_or_differ_are_refused_on_all(folder, comm, P_world):
    y, last = shard((1, comm.size), torch.ones(4, 6)), comm.rank == comm.size - 1
    for error, words, given in (
        (MismatchError, "spacing: ", {"spacing": (1, 1 + last)}),
        (MismatchError, "axes: ", {"axes": "yx" if last else "zx"}),
        (ArgumentError, "axes= has an entry", {"axes": "yy" if last else "yx"}),
        (ArgumentError, "units= has an entry", {"units": ("mm",) if last else None}),
        (ArgumentError, "OME-Zarr image", {"axes": "cx" if last else "yx"}),
    ):
        refused(error, words, create_array(folder / "y.ome.zarr", (4, 6), like=y, **given))
    refused(ArgumentError, "no place for axes", create_array(folder / "y.npy", (4, 6), like=y, axes="yx"))
    assert not [*folder.iterdir()]

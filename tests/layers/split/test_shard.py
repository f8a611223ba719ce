"""Whole tensors, arrays and files cut into split tensors: every rank has its block."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from distdl_rma import (
    ArgumentError,
    DataError,
    Partition,
    PartitionError,
    ShapeError,
    Source,
    SplitTensor,
    UnsupportedError,
    open_array,
    shard,
)
from distdl_rma.geometry import Box, Decomposition
from distdl_rma.layers.split.shard import balanced_block
from tests.layers.sources import formats
from tests.run_mpi import completed, mpiexec


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_every_rank_keeps_its_block(P_world):
    whole = torch.randn(2, 3, 7, 5, requires_grad=True)
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = shard(P_x, whole)
    assert x.requires_grad
    assert torch.equal(x.to_local(), whole[x.decomposition.slices()])
    assert x.to_local().data_ptr() != whole.data_ptr()
    assert torch.equal(shard(P_x, whole.detach().numpy()).full_tensor(), whole)


RANKS, GRID = (3, 5, 2, 7, 4, 6), (2, 1, 3)


def shards(x):
    return [balanced_block(Partition(RANKS, GRID, rank), x) for rank in RANKS]


def joined(parts, shape):
    blocks = Decomposition.balanced(Partition(RANKS, GRID, RANKS[0]), shape)
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for rank, part in zip(RANKS, parts, strict=True):
        whole[blocks.box(rank).slices(Box.of_shape(shape))] = part
    return whole


class Dataset:
    """What can be sliced and no more, as a dataset in a file; remembers how much was read."""

    def __init__(self, values):
        self.shape, self.dtype, self._values, self.read = values.shape, values.dtype, values, 0

    def __getitem__(self, place):
        part = self._values[place]
        self.read += part.size
        return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_shards_of_a_tensor_are_its_parts(dtype):
    x = (10 * torch.randn(5, 2, 7)).to(dtype)
    parts = shards(x)
    assert {part.dtype for part in parts} == {dtype}
    assert torch.equal(joined(parts, x.shape), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16, np.bool_, np.uint16, ">f4"])
def test_shards_of_an_array_and_of_a_memory_mapped_file_are_its_parts(tmp_path, dtype):
    x = (10 * np.random.default_rng(0).random((5, 2, 7))).astype(dtype)
    x.tofile(tmp_path / "x")
    native = x.astype(x.dtype.newbyteorder("="))
    for each in (x, np.memmap(tmp_path / "x", dtype, "r", shape=x.shape)):
        parts = shards(each)
        assert {part.dtype for part in parts} == {torch.from_numpy(native).dtype}
        assert np.array_equal(joined(parts, x.shape).numpy(), native)
        # Also of a file that may only be read.
        parts[0].zero_()


def test_only_the_shard_is_read():
    x = Dataset(np.arange(70.0).reshape(5, 2, 7))
    part = balanced_block(Partition(RANKS, GRID, 2), x)
    assert x.read == part.numel() < 70
    outside = balanced_block(Partition(RANKS, GRID, 1), x)
    assert x.read == part.numel() and outside.shape == (5, 0)


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_a_shard_has_memory_of_its_own(make):
    x = make(8).reshape(8, 1, 1)
    parts = shards(x)
    assert all(part.is_contiguous() for part in parts)
    for part in parts:
        part += 1
    assert x.reshape(-1).tolist() == list(range(8))
    assert parts[0].untyped_storage().nbytes() == parts[0].nbytes


def test_a_shard_is_in_no_graph():
    x = torch.rand(4, 1, 3, requires_grad=True)
    assert not any(part.requires_grad for part in shards(x * 2))


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("shape", [(5, 2, 7), (0, 2, 7)])
def test_ranks_outside_have_no_elements(make, shape):
    part = balanced_block(Partition(RANKS, GRID, 0), make(shape))
    assert part.shape == (shape[0], 0)
    assert part.dtype == torch.as_tensor(make(shape)).dtype


def test_dimensions_must_be_those_of_the_partition():
    for rank in (3, 0):
        with pytest.raises(PartitionError):
            balanced_block(Partition(RANKS, GRID, rank), torch.zeros(4, 4))


def saved(folder, comm, **arrays):
    """Files of arrays by name, which the first rank writes before any rank goes on."""
    for name, x in arrays.items() if comm.rank == 0 else ():
        np.save(folder / f"{name}.npy", x)
    comm.Barrier()


GRIDS = {
    1: [(1,)],
    2: [(2,), (2, 1), (2, 1, 1)],
    3: [(3,), (1, 3, 1), (3, 1, 1)],
    4: [(2, 2), (1, 2, 2), (4, 1, 1)],
}


@pytest.fixture
def folder(tmp_path, comm):
    return type(tmp_path)(comm.bcast(str(tmp_path)))


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore:.*chunks of.*:UserWarning")
@pytest.mark.parametrize("made", formats.FILES, ids=lambda made: made.__name__)
def test_a_file_is_cut_like_its_array(made, folder, comm, P_world):
    # The first grid leaves a rank without elements where there are more than two.
    for extent in (2, 19):
        x = np.random.default_rng(0).integers(0, 99, (3, 5, extent)).astype("int16")
        if comm.rank == 0:
            (folder / str(extent)).mkdir()
            path = str(made(folder / str(extent), x))
        path = comm.bcast(path if comm.rank == 0 else None)
        for grid in GRIDS[comm.size]:
            y = shard(grid, path)
            assert torch.equal(y.to_local(), torch.from_numpy(x)[y.decomposition.slices()])
            assert torch.equal(y.full_tensor(), torch.from_numpy(x))


@pytest.mark.mpi
def test_each_rank_reads_its_block_and_no_more(comm, P_world):
    asked = []
    x = np.zeros((2, 10, 7))
    source = Source(x.shape, x.dtype, lambda box: asked.append(box) or x[box])
    y = shard((comm.size, 1), source)
    assert asked == [y.decomposition.slices()]


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_is_raised_on_all(folder, comm, P_world):
    saved(folder, comm, x=np.zeros((4, 6)))
    path = folder / ("x.npy" if comm.rank != 1 else "y.npy")
    words = r"y\.npy: not found" if comm.rank == 1 else r"shard: rank 1: .*y\.npy: not found"
    with pytest.raises(DataError, match=words):
        shard((comm.size, 1), path)

    def read(box):
        if comm.rank == 1:
            raise OSError("the disk is gone")
        return np.zeros([each.stop - each.start for each in box])

    with pytest.raises(DataError, match=r"shard: rank 1: OSError: the disk is gone"):
        shard((comm.size, 1), Source((8, 6), float, read))
    # The ranks go on together.
    assert shard((comm.size, 1), folder / "x.npy").full_tensor().shape == (4, 6)


# A call on n ranks, of x.npy, text.npy and a tensor that is split already, and its error.
TAKES = "takes a grid, then a tensor or an array, got '{}'"
NO_BLOCK = r"a block is of type SplitTensor, .* to_local\(\)"
REFUSED = [
    (lambda n, P_x, x, folder: shard(P_x, torch.zeros(2, 2, 2)), PartitionError, None),
    (lambda n, P_x, x, folder: shard((n, 1), [[1.0, 2.0]]), ArgumentError, TAKES.format("list")),
    (lambda n, P_x, x, folder: shard(torch.zeros(2, 2), {"H": -1}), ArgumentError, TAKES.format("dict")),
    (lambda n, P_x, x, folder: shard(P_x, x), ArgumentError, r"got a SplitTensor; its redistribute\(\)"),
    (lambda n, P_x, x, folder: SplitTensor.from_local(x, P_x, None), ShapeError, NO_BLOCK),
    (lambda n, P_x, x, folder: SplitTensor.from_local(x, P_x, (6, 4)), ShapeError, NO_BLOCK),
    (lambda n, P_x, x, folder: shard((n, 1), "x.nii.gz"), UnsupportedError, "gunzip"),
    (lambda n, P_x, x, folder: shard((n + 1, 1), folder / "x.npy"), PartitionError, None),
    (lambda n, P_x, x, folder: shard((1, 1, n), folder / "x.npy"), ArgumentError, "a grid is given as"),
    (lambda n, P_x, x, folder: shard((n, 1), folder / "text.npy"), ShapeError, r"its elements are \|S3"),
    (lambda n, P_x, x, folder: shard({"H": n}, folder / "x.npy"), ArgumentError, "letters such as 'H' is of"),
]


@pytest.mark.mpi
def test_errors_that_all_ranks_have_keep_their_kind(folder, comm, P_world):
    saved(folder, comm, x=np.zeros((4, 6)), text=np.zeros((4, 6), "S3"))
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x = shard(P_x, torch.zeros(6, 4))
    for call, error, words in REFUSED:
        with pytest.raises(error, match=words):
            call(comm.size, P_x, x, folder)


@pytest.mark.mpi(min_size=2)
def test_sources_of_other_sizes_or_elements_are_refused_on_all_ranks(folder, comm, P_world):
    np.save(folder / f"{comm.rank}.npy", np.zeros((4, 6 + comm.rank)))
    with pytest.raises(ShapeError, match=r"\(4, 6\) of torch\.float64 on rank 0, but \(4, 7\) .* rank 1"):
        shard((comm.size, 1), folder / f"{comm.rank}.npy")
    kind = [np.float32, np.float64][comm.rank % 2]
    with pytest.raises(ShapeError, match=r"float32 on rank 0, but \(4, 6\) of torch\.float64 on rank 1"):
        shard((comm.size, 1), Source((4, 6), kind, lambda box: np.zeros((4, 6), kind)[box]))


@pytest.mark.mpi(min_size=2)
def test_grids_that_differ_are_refused_on_all_ranks(folder, comm, P_world):
    saved(folder, comm, x=np.zeros((4, 6)))
    grid = (comm.size, 1) if comm.rank else (1, comm.size)
    with pytest.raises(
        ShapeError, match=r"shard: grid: \(1, \d\) on rank 0, but \(\d, 1\) on rank 1; .*x\.npy"
    ):
        shard(grid, folder / "x.npy")


@pytest.mark.mpi(min_size=2)
def test_one_rank_warns_of_chunks_that_all_would_read(folder, comm, P_world):
    x = np.zeros((8, 12), np.float32)
    source = Source(x.shape, x.dtype, lambda box: x[box], chunks=(8, 12))
    if comm.rank == 0:
        with pytest.warns(UserWarning, match=rf"fetch {comm.size}\.00 times") as caught:
            shard((comm.size, 1), source)
        assert caught[0].filename == __file__
    else:
        shard((comm.size, 1), source)


MEASURE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from mpi4py import MPI
from distdl_rma import Machine, shard
from tests.layers.sources.test_raw import bytes_read, peak_nbytes
comm = MPI.COMM_WORLD
Machine.on()
small = shard((comm.size, 1), Path(sys.argv[1]) / "small.npy")
before, found = bytes_read(), []
peak = peak_nbytes(lambda: found.append(shard((comm.size, 1), Path(sys.argv[1]) / "x.npy")) or found)
taken = comm.gather([bytes_read() - before, peak])
if comm.rank == 0:
    print(json.dumps(taken))
"""


def test_bytes_and_memory_are_those_of_the_block(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 4096, 2048), np.float32))
    np.save(tmp_path / "small.npy", np.ones((4, 16, 2), np.float32))
    done = completed([*mpiexec(2), sys.executable, "-m", "mpi4py", "-c", MEASURE, str(tmp_path)], 100)
    assert done.returncode == 0, done.stderr
    block = 4 * 4096 * 2048 * 4 // 2
    for taken, peak in json.loads(done.stdout.splitlines()[-1]):
        assert block <= taken < 1.01 * block
        assert block // 2 < peak < 1.3 * block


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:.*chunks of.*:UserWarning")
def test_opened_sources_can_be_cut_again_and_again(folder, comm, P_world):
    if comm.rank == 0:
        formats.OF["hdf5, chunked"](folder, np.arange(24, dtype=np.float32).reshape(4, 6))
    comm.Barrier()
    source = open_array(f"{folder / 'x.h5'}::deep/x")
    for grid in ((comm.size, 1), (1, comm.size)):
        assert shard(grid, source).full_tensor().sum() == 276

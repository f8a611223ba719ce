"""Split tensors of files: every rank reads its block, and all of them know when one of them cannot."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from distdl_rma import (
    ArgumentError,
    DataError,
    PartitionError,
    ShapeError,
    Source,
    UnsupportedError,
    open_array,
    shard,
)
from tests.run_mpi import completed, mpiexec
from tests.sources import formats

GRIDS = {
    1: [(1,)],
    2: [(2,), (2, 1), (2, 1, 1)],
    3: [(3,), (1, 3, 1), (3, 1, 1)],
    4: [(2, 2), (1, 2, 2), (4, 1, 1)],
}


@pytest.fixture
def folder(tmp_path, comm):
    """One for all ranks."""
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
    if comm.rank == 0:
        np.save(folder / "x.npy", np.zeros((4, 6)))
    comm.Barrier()
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


@pytest.mark.mpi
def test_errors_that_all_ranks_have_keep_their_kind(folder, comm, P_world):
    if comm.rank == 0:
        np.save(folder / "x.npy", np.zeros((4, 6)))
        np.save(folder / "text.npy", np.zeros((4, 6), "S3"))
    comm.Barrier()
    with pytest.raises(UnsupportedError, match="gunzip"):
        shard((comm.size, 1), "x.nii.gz")
    with pytest.raises(PartitionError):
        shard((comm.size + 1, 1), folder / "x.npy")
    with pytest.raises(ArgumentError, match="a grid is given as"):
        shard((1, 1, comm.size), folder / "x.npy")
    with pytest.raises(ShapeError, match=r"text\.npy: its elements are \|S3"):
        shard((comm.size, 1), folder / "text.npy")


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
    if comm.rank == 0:
        np.save(folder / "x.npy", np.zeros((4, 6)))
    comm.Barrier()
    grid = (comm.size, 1) if comm.rank else (1, comm.size)
    with pytest.raises(
        ShapeError, match=r"shard: grid: \(1, \d\) on rank 0, but \(\d, 1\) on rank 1; .*x\.npy"
    ):
        shard(grid, folder / "x.npy")
    words = r"x\.npy has shape \(4, 6\): a grid of letters such as 'H' is of a tensor with batch"
    with pytest.raises(ArgumentError, match=words):
        shard({"H": comm.size}, folder / "x.npy")


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
from tests.sources.test_raw import bytes_read, peak_nbytes
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

"""Files of jobs over two hosts: on a disk that both see, and on one that each has; ``make test-hosts``."""

import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from distdl_rma import (
    CheckpointError,
    Checkpoints,
    DataError,
    ShapeError,
    ShardDataset,
    ShardLoader,
    Source,
    create_array,
    load_checkpoint,
    open_array,
    plan_prediction,
    predict,
    shard,
    write_shards,
)
from tests.jobs.out_of_core.nets import UNet, whole
from tests.layers.partitioned.sequential import grids
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]
# Rows of few bytes, of which several ranks write parts.
X = np.random.default_rng(0).normal(size=(3, 2, 12, 17)).astype(np.float32)
NAMES = [("x.npy", None), ("x.h5", None), ("x.zarr", None), ("x.zarr", (1, 1, 5, 4))]
# Mounted by each host for itself.
OWN = Path("/dev/shm/of-this-host")


@pytest.fixture
def folder(tmp_path, comm):
    """One that both hosts see."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def own(comm):
    """One that each host has for itself."""
    OWN.mkdir(exist_ok=True)
    comm.Barrier()
    yield OWN
    comm.Barrier()
    if is_first_of_host(comm):
        for path in sorted(OWN.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        OWN.rmdir()


def saved(comm, path, values=X):
    """A file that the first rank has written."""
    if comm.rank == 0:
        np.save(path, values)
    comm.Barrier()
    return path


def first_host(comm):
    return comm.rank < int(os.environ[RANKS_VARIABLE].split(",")[0])


def is_first_of_host(comm):
    return comm.rank in (0, int(os.environ[RANKS_VARIABLE].split(",")[0]))


@pytest.mark.filterwarnings("ignore:.*are read whole")
@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_what_ranks_of_both_hosts_write_others_read(name, chunks, folder, comm, P_world):
    found = list(grids(comm.size, 2))
    for number, grid in enumerate(found):
        path, y = folder / f"{number}-{name}", shard(P_world.create_cartesian_topology_partition(grid), X)
        with create_array(path, (3, 2, 12, 40), like=y, chunks=chunks) as sink:
            # The second host's client of a network file system would write whole pages of a mapped file.
            assert getattr(sink._opened, "on_hosts", True)
            write_shards(sink, y, at=(0, 0, 0, 3))
            write_shards(sink, 2 * y, at=(0, 0, 0, 20))
        expected = np.zeros((3, 2, 12, 40), np.float32)
        expected[..., 3:20], expected[..., 20:37] = X, 2 * X
        for other in found:
            z = shard(P_world.create_cartesian_topology_partition(other), path)
            assert np.array_equal(z.to_local().numpy(), expected[z.decomposition.slices()])


def test_a_loader_reads_samples_of_a_shared_file(folder, comm, P_world):
    path = saved(comm, folder / "x.npy")
    loader = ShardLoader(ShardDataset(path, [0, 1, 2], grid={"H": -1}), shuffle=True)
    seen = [(image.full_tensor().numpy(), int(number)) for image, number in loader]
    assert sorted(number for _, number in seen) == [0, 1, 2]
    assert all(np.array_equal(image[0], X[number]) for image, number in seen)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_go_on_in_a_shared_folder(asynchronous, folder, comm, P_world):
    torch.manual_seed(0)
    whole = torch.rand(5, 40, 37)
    state = {"x": shard((1, comm.size, 1), whole), "copies": torch.rand(1000), "at": 3}
    with Checkpoints(folder / "run", asynchronous=asynchronous) as kept:
        kept.save(state, 7)
        kept.wait()
        again = {"x": shard((1, 1, comm.size), torch.zeros(5, 40, 37)), "copies": torch.zeros(1000), "at": 0}
        assert kept.restore(again) == 7
    assert torch.equal(again["x"].full_tensor(), whole)
    assert torch.equal(again["copies"], state["copies"]) and again["at"] == 3
    alone = {"x": torch.zeros(5, 40, 37), "copies": torch.zeros(1000), "at": 0}
    assert load_checkpoint(folder / "run", alone) == 7
    assert torch.equal(alone["x"], whole)


def test_a_file_that_one_host_lacks_is_an_error_on_all_ranks(own, comm, P_world):
    path = saved(comm, own / "x.npy")
    for use in (
        lambda: shard({"H": comm.size}, path),
        lambda: ShardLoader(ShardDataset(path, grid={"H": -1})),
        lambda: predict(torch.nn.Conv2d(2, 1, 1), path, own / "z.npy", grid={"H": 4}, comm=comm),
    ):
        with pytest.raises(
            DataError, match=r"x\.npy: not found on .*a path that leads all of them to the file"
        ):
            use()
    if is_first_of_host(comm):
        np.save(own / "y.npy", X if first_host(comm) else X[..., :-1])
    comm.Barrier()
    with pytest.raises(ShapeError, match=r"source: \(3, 2, 12, 17\) .* on rank 0, but \(3, 2, 12, 16\)"):
        shard({"H": comm.size}, own / "y.npy")
    assert shard({"H": comm.size}, torch.from_numpy(X)).full_tensor().shape == X.shape


@pytest.mark.parametrize("name", ["x.npy", "x.h5", "x.zarr"])
def test_a_folder_that_hosts_do_not_share_is_refused_for_writing(name, own, comm, P_world):
    y = shard({"H": comm.size}, X)
    with (
        pytest.raises(DataError, match=r"\.part: not found on .*a path that leads all of them to the file"),
        create_array(own / name, X.shape, like=y),
    ):
        pytest.fail("entered")
    comm.Barrier()
    assert not list(own.iterdir())


@pytest.mark.parametrize("norm", ["none", "instance"])
@pytest.mark.parametrize("suffix", ["npy", "h5", "zarr"])
def test_hosts_predict_together_and_the_first_writes(norm, suffix, folder, own, comm):
    torch.manual_seed(0)
    model, x = UNet(2, norm), torch.rand(2, 1, 120, 60)
    source = saved(comm, folder / "x.npy", x.numpy())
    for place in (folder, own):
        path = place / f"y.{suffix}"
        predict(model, source, path, grid={"H": 9}, comm=comm)
        assert path.exists() == (place == folder or first_host(comm))
        if path.exists():
            found = torch.as_tensor(np.asarray(open_array(path)[0:2, 0:3, 0:120, 0:60]))
            torch.testing.assert_close(found, whole(model, x), rtol=1e-4, atol=1e-5)


def test_a_prediction_of_hosts_goes_on(folder, own, comm):
    torch.manual_seed(0)
    model, x, grid, reads, broken = UNet(2, "none"), torch.rand(120, 60), {"H": 12}, [], [True]
    *starts, _ = sorted({0, *accumulate(plan_prediction(model, x, grid=grid).splits[2].lengths)})

    def read(box):
        if box[0].stop == x.shape[0] and broken:
            raise OSError("the network is gone")
        reads.append(starts.index(box[0].start))
        return x[box]

    source = Source(tuple(x.shape), x.dtype, read)
    with pytest.raises(DataError, match="the network is gone"):
        predict(model, source, own / "y.npy", grid=grid, comm=comm)
    broken.clear()
    reads.clear()
    predict(model, source, own / "y.npy", grid=grid, comm=comm)
    assert not reads or min(reads) >= len(starts) - 1 - 2 * (comm.size - 1)
    if first_host(comm):
        found = torch.from_numpy(np.load(own / "y.npy"))
        torch.testing.assert_close(found, whole(model, x[None, None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_hosts_do_not_share_is_refused_for_checkpoints(asynchronous, own, comm, P_world):
    state = {"x": shard({"H": comm.size}, X), "n": 1}

    def save(kept):
        kept.save(state, 1)
        kept.wait()

    with Checkpoints(own / "run", asynchronous=asynchronous) as kept:
        with pytest.raises(
            CheckpointError, match=r"data\.safetensors failed: .* on a disk that all hosts share"
        ):
            save(kept)
        comm.Barrier()
        assert not first_host(comm) or not list((own / "run").iterdir())
        assert kept.restore(state) == 0

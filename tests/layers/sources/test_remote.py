"""Files of a server are read by ranges, and a server that does not answer well is an error with the URL."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from distdl_rma import ArgumentError, DataError, UnsupportedError, create_array, open_array, shard
from distdl_rma.layers.sources import remote
from distdl_rma.layers.sources.reading import read_box
from tests.layers.sources.formats import OF, holds_in_a_fork
from tests.layers.sources.server import serving

pytest.importorskip("aiohttp")
X = np.arange(40 * 50, dtype=np.float32).reshape(40, 50)
BOX = (slice(7, 9), slice(2, 49))
BY_RANGE = [
    "npy", "npy by columns", "npy, big endian", "hdf5", "hdf5, chunked", "zarr 2", "zarr 3", "zarr, sharded",
    "zarr, group", "tiff", "tiff, tiled", "tiff, pages", "nifti",
]  # fmt: skip
RANGES_ALONE = ["npy", "hdf5, chunked", "zarr, sharded", "tiff, tiled", "nifti"]


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as found:
        yield found


def url_of(server, path):
    return str(path).replace(server.folder, server.url)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """32 MB in one file."""
    x = np.random.default_rng(0).integers(0, 1 << 16, (64, 500, 500), np.uint16)
    np.save(tmp_path_factory.mktemp("large") / "x.npy", x)
    return x, tmp_path_factory.getbasetemp() / "large0"


@pytest.mark.parametrize("name", BY_RANGE)
def test_a_url_has_the_elements_of_the_file(name, server, tmp_path):
    source = open_array(url_of(server, OF[name](tmp_path, X)))
    there = pickle.loads(pickle.dumps(source))
    for found in (source, there):
        assert (found.shape, np.dtype(found.dtype).newbyteorder("=")) == (X.shape, X.dtype)
        assert torch.equal(read_box(found, BOX), torch.from_numpy(X[BOX]))
        assert read_box(found, (slice(3, 3), slice(0, 50))).shape == (0, 50)


BOXES = {
    "rows": ((slice(3, 5), slice(0, 500), slice(0, 500)), 1.0),
    "a column of far rows": ((slice(0, 64), slice(10, 11), slice(0, 500)), 1.0),
    "near pieces": ((slice(3, 4), slice(0, 500), slice(0, 250)), 2.0),
    "far pieces": ((slice(0, 64), slice(4, 6), slice(0, 1)), 251.0),
    "all": ((slice(0, 64), slice(0, 500), slice(0, 500)), 1.0),
}


@pytest.mark.parametrize("name", BOXES)
def test_a_box_asks_for_its_bytes_and_near_ones(name, large):
    x, folder = large
    box, factor = BOXES[name]
    with serving(folder) as server:
        source = open_array(f"{server.url}/x.npy")
        assert server.sent <= remote.AHEAD_NBYTES
        server.sent = 0
        assert np.array_equal(source[box], x[box])
        assert server.sent <= factor * x[box].nbytes * 1.01


def test_a_process_opens_connections_of_its_own(server, tmp_path):
    paths = [OF[name](tmp_path, X) for name in ("npy", "hdf5, chunked", "zarr 3", "tiff, tiled")]
    sources = [open_array(url_of(server, path)) for path in paths]

    def right():
        return all(torch.equal(read_box(source, BOX), torch.from_numpy(X[BOX])) for source in sources)

    assert right()
    assert holds_in_a_fork(right) and right()


@pytest.mark.parametrize("name", RANGES_ALONE)
def test_a_server_without_ranges_is_refused_before_it_sends_the_file(name, server, tmp_path):
    path = url_of(server, OF[name](tmp_path, np.ones((400, 500))[:: 1 if "zarr" not in name else 20]))
    server.ranges = False
    with pytest.raises(DataError, match=f"{server.url}.* by the whole file"):
        read_box(open_array(path), BOX)


@pytest.mark.parametrize("name", ["npy", "hdf5, chunked", "zarr 3", "tiff", "nifti"])
def test_a_server_that_fails_is_an_error_with_the_url_and_its_reason(name, server, tmp_path):
    path = url_of(server, OF[name](tmp_path, X))
    source = open_array(path)
    place = path.partition("::")[0]
    for status, words in ((500, "500"), (403, "403"), (404, "404|NotFound")):
        server.status = status
        with pytest.raises(DataError, match=f"{place}.*({words})"):
            open_array(path)
        if (status, name) != (404, "zarr 3"):
            with pytest.raises(DataError, match=f"{place}.*({words})"):
                source[BOX]
    server.status = 200
    assert np.array_equal(source[BOX], X[BOX])
    with pytest.raises(DataError, match=f"{server.url}/none"):
        open_array(f"{server.url}/none{Path(place).suffix}")


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".h5"])
def test_nobody_at_the_port_is_an_error(suffix):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{found.getsockname()[1]}/x{suffix}"
        with pytest.raises(DataError, match=f"{url}.*Cannot connect"):
            open_array(url)


@pytest.mark.parametrize("name", ["npy", "hdf5, chunked", "zarr 3"])
def test_a_server_that_is_silent_is_an_error_soon(name, server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_SILENT_SECONDS", 0.3)
    path = url_of(server, OF[name](tmp_path, X))
    source = open_array(path)
    server.stalls = ("/",)
    begin = time.monotonic()
    for call in (lambda: source[BOX], lambda: open_array(path)):
        with pytest.raises(DataError, match=rf"{server.url}.*(Timeout|timeout)"):
            call()
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("name", ["npy", "hdf5", "hdf5, chunked", "tiff, tiled"])
def test_a_file_that_changes_or_shrinks_is_not_read_on(name, server, tmp_path):
    path = OF[name](tmp_path, X)
    file = Path(str(path).partition("::")[0])
    source = open_array(url_of(server, path))
    there = pickle.dumps(source)
    OF[name](tmp_path, 2 * X)
    for each in (source, pickle.loads(there)):
        with pytest.raises(DataError, match=r"has changed on the server|reading .* failed"):
            each[BOX]
    os.truncate(file, file.stat().st_size // 3)
    with pytest.raises(DataError, match=f"{server.url}"):
        source[slice(30, 40), slice(0, 50)]


def test_what_is_not_read_from_servers_says_so(server, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match="NetCDF is read from disks"):
        open_array(url_of(server, OF["netcdf"](tmp_path, X)))
    with pytest.raises(ArgumentError, match="nosuch"):
        open_array("nosuch://host/x.npy")
    with pytest.raises(ArgumentError, match=r"no suffix"):
        open_array("http://host/x.png?y=.npy")
    with pytest.raises(ArgumentError, match=r"a result is written to a disk"):
        create_array(f"{server.url}/y.npy", (4,), like=shard((1,), torch.zeros(4)))


def test_a_missing_package_of_servers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"gs:.*install gcsfs"):
        open_array("gs://bucket/x.npy")
    for package in ("aiohttp", "fsspec"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=rf"{package}.*pip install 'distdl_rma\[remote\]'"):
            open_array("http://host/x.npy")


def test_elements_of_hdf5_in_files_of_this_machine_are_not_for_servers(server, tmp_path, monkeypatch):
    import h5py

    monkeypatch.chdir(tmp_path)
    X.tofile("secret")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("raw", X.shape, X.dtype, external=[("secret", 0, h5py.h5f.UNLIMITED)])
        file["link"] = h5py.ExternalLink("other.h5", "x")
        file["soft"] = h5py.SoftLink("/deep/x")
        file["deep/x"] = X
    for name in ("raw", "link"):
        with pytest.raises(DataError, match=r"has elements in the file|leads into the file"):
            open_array(f"{server.url}/x.h5::{name}")
    assert np.array_equal(open_array(f"{server.url}/x.h5::soft")[BOX], X[BOX])


def test_other_protocols_and_paths_with_file_are_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    path = OF["npy"](tmp_path, X)
    with fsspec.open("memory://x/x.npy", "wb") as file:
        file.write(path.read_bytes())
    for url in ("memory://x/x.npy", f"file://{path}"):
        assert np.array_equal(open_array(url)[BOX], X[BOX])


def test_garbage_of_h5py_is_not_collected_by_the_thread_that_receives_bytes(server, tmp_path):
    import h5py

    x, threshold = np.random.default_rng(0).normal(size=(20, 100, 200)), gc.get_threshold()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(1, 100, 200))
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(10):
            for _ in range(20):
                cycle = [h5py.File(tmp_path / "x.h5")["x"]]
                cycle.append(cycle)
            assert np.array_equal(open_array(f"{server.url}/x.h5")[:20, :100, :200], x)
            assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", ["npy", "hdf5, chunked", "zarr 3"])
def test_each_rank_reads_its_block_of_a_server(name, tmp_path, comm, P_world):
    x = np.random.default_rng(0).normal(size=(8, 61, 1000 if name == "npy" else 20)).astype(np.float32)
    with serving(tmp_path) as server:
        path = url_of(server, OF[name](tmp_path, x)) if comm.rank == 0 else None
        path = comm.bcast(path)
        y = shard((1, comm.size, 1), path)
        assert torch.equal(y.to_local(), torch.from_numpy(x)[y.decomposition.slices()])
        comm.Barrier()
        if name == "npy":
            # A header for each rank, and then its block.
            assert comm.rank or server.sent <= comm.size * remote.AHEAD_NBYTES + 1.01 * x.nbytes
        comm.Barrier()
        server.status = 500
        comm.Barrier()
        with pytest.raises(DataError, match="500"):
            shard((1, comm.size, 1), path)
        server.status = 200
        comm.Barrier()
        assert torch.equal(shard((1, comm.size, 1), path).full_tensor(), torch.from_numpy(x))

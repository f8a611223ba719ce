"""HDF5: one lock for all who call it, and links that lead to files beside, never elsewhere."""

import os
import threading

import numpy as np
import pytest

from distdl_rma import ArgumentError, DataError, open_array
from distdl_rma.layers.sources.hdf5 import hdf5_lock


@pytest.fixture
def x():
    return np.arange(80, dtype=np.float32).reshape(4, 20)


def test_a_thread_waits_for_another_one_and_a_fork_for_none_of_its_parent(monkeypatch):
    taken = []
    with hdf5_lock(), hdf5_lock(False):
        # A thread may take it twice: a library calls what calls it.
        with hdf5_lock():
            thread = threading.Thread(target=lambda: taken.append(hdf5_lock().acquire(blocking=False)))
            thread.start()
            thread.join(60)
        parents = hdf5_lock()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert hdf5_lock() is not parents
    assert taken == [False]


def linked(path, x):
    """Files that name each other: links of all kinds, elements in files beside, virtual datasets."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path / "other.h5", "w") as file:
        file["x"] = x
    with h5py.File(path / "main.h5", "w") as file:
        file["entry/x"] = x
        file["hard"], file["soft"] = file["entry/x"], h5py.SoftLink("entry/x")
        file["far/soft"], file["group"] = h5py.SoftLink("/soft"), h5py.SoftLink("entry")
        file["file"], file["empty"] = h5py.ExternalLink("other.h5", "/x"), h5py.Empty("f4")
        file["loop"], file["gone"] = h5py.SoftLink("/loop"), h5py.ExternalLink("gone.h5", "/x")
        file.create_dataset("raw", x.shape, "f4", external=[("raw.bin", 0, x.nbytes)])[...] = x
        for name, source in (
            ("virtual", ("other.h5", "x")),
            ("twice", (".", "virtual")),
            ("mad", (".", "mad")),
        ):
            layout = h5py.VirtualLayout(x.shape, "f4")
            layout[:] = h5py.VirtualSource(*source, x.shape)
            file.create_virtual_dataset(name, layout)
    return path / "main.h5"


def test_links_and_elements_in_files_beside_are_read(x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = linked(tmp_path, x)
    for name in ("entry/x", "hard", "soft", "far/soft", "group/x", "file", "raw", "virtual", "twice"):
        for each in (path, path.name):
            assert np.array_equal(open_array(each, name)[(slice(0, 4), slice(0, 20))], x), name
    with pytest.raises(ArgumentError, match=r"which one.*'file', 'gone'"):
        open_array(path)
    with pytest.raises(ArgumentError, match="'loop' is a link that leads to no dataset"):
        open_array(path, "loop")
    with pytest.raises(DataError, match=r"'/empty' is null: it has a type, but no elements"):
        open_array(path, "empty")
    with pytest.raises(DataError, match=r"main\.h5: has elements in the file 'gone\.h5'"):
        open_array(path, "gone")
    with pytest.raises(DataError, match=r"main\.h5: shows elements of a dataset 'mad'"):
        open_array(path, "mad")


@pytest.mark.parametrize("suffix", ["h5", "nc"])
def test_elements_in_files_elsewhere_are_refused(suffix, x, tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    (folder := tmp_path / "folder").mkdir()
    monkeypatch.chdir(folder)
    linked(tmp_path, x)
    (folder / "link.h5").symlink_to(tmp_path / "other.h5")
    for number, place in enumerate((str(tmp_path / "other.h5"), "../other.h5", "link.h5")):
        with h5py.File(path := folder / f"{number}.{suffix}", "w") as file:
            file["link"] = h5py.ExternalLink(place, "/x")
            file.create_dataset("raw", x.shape, "f4", external=[(place, 0, x.nbytes)])
            layout = h5py.VirtualLayout(x.shape, "f4")
            layout[:] = h5py.VirtualSource(place, "x", x.shape)
            file.create_virtual_dataset("virtual", layout)
        for name in ("link", "raw", "virtual"):
            with pytest.raises(DataError, match=r"has elements in the file '.*h5py\.File\("):
                open_array(path, name)


def test_a_link_to_a_file_of_hdf5_finds_what_is_beside_the_file(x, tmp_path):
    h5py = pytest.importorskip("h5py")
    for each in ("data/sub", "view"):
        (tmp_path / each).mkdir(parents=True)
    with h5py.File(tmp_path / "data/sub/other.h5", "w") as file:
        file["x"] = x
    with h5py.File(tmp_path / "data/main.h5", "w") as file:
        file["x"] = h5py.ExternalLink("sub/other.h5", "x")
    (tmp_path / "view/main.h5").symlink_to("../data/main.h5")
    found = open_array(tmp_path / "view/main.h5", "x")
    assert (np.asarray(found[tuple(slice(0, n) for n in x.shape)]) == x).all()

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


@pytest.fixture
def main(x, tmp_path, monkeypatch):
    """A file with links of all kinds, elements in a file beside, and a virtual dataset."""
    h5py = pytest.importorskip("h5py")
    # Where the library looks for the file beside.
    monkeypatch.chdir(tmp_path)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = x
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["entry/x"] = x
        file["hard"], file["soft"] = file["entry/x"], h5py.SoftLink("entry/x")
        file["far/soft"], file["group"] = h5py.SoftLink("/soft"), h5py.SoftLink("entry")
        file["file"], file["empty"] = h5py.ExternalLink("other.h5", "/"), h5py.Empty("f4")
        file["loop"], file["out"] = h5py.SoftLink("/loop"), h5py.SoftLink("file/x")
        file.create_dataset("raw", x.shape, "f4", external=[("raw.bin", 0, x.nbytes)])[...] = x
        layout = h5py.VirtualLayout(x.shape, "f4")
        layout[:] = h5py.VirtualSource("other.h5", "x", x.shape)
        file.create_virtual_dataset("virtual", layout)
    return tmp_path / "main.h5"


def test_links_within_a_file_are_followed(x, main):
    for name in ("entry/x", "hard", "soft", "far/soft", "group/x"):
        assert np.array_equal(open_array(main, name)[(slice(0, 4), slice(0, 20))], x), name
    for name, said in (("", "which one.*'entry/x'"), ("loop", "none is called 'loop'")):
        with pytest.raises(ArgumentError, match=said):
            open_array(main, name or None)
    with pytest.raises(DataError, match=r"'/empty' is null: it has a type, but no elements"):
        open_array(main, "empty")


def test_elements_of_other_files_are_refused(main):
    h5py = pytest.importorskip("h5py")
    reasons = {
        "file/x": "leads into the file 'other.h5'",
        "out": "leads into the file 'other.h5'",
        "raw": "has elements in the file 'raw.bin'",
        "virtual": "is virtual",
    }
    for name, reason in reasons.items():
        with pytest.raises(DataError, match=rf"{reason}.*h5py\.File\("):
            open_array(main, name)
    with h5py.File(main, "a") as file:
        for name in ("file", "out", "empty", "loop", "soft", "far", "group"):
            del file[name]
        file["file"] = h5py.ExternalLink("other.h5", "/x")
    path = main.rename(main.with_suffix(".nc"))
    for name in ("file", "raw", "virtual"):
        with pytest.raises(DataError, match=rf"{reasons.get(name, 'leads into')}.*h5py\.File\("):
            open_array(path, name)

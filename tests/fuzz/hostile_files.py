"""Random damage and hostile headers: each file of data is read as it is, or refused in words, on all ranks.

A forked process of rank 0 reads it first, with bounded time and memory. What has ended well there is read by
all ranks, but for files of HDF5, whose C library may not survive damage that it does not notice.
"""

import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from distdl_rma import DistdlError, open_array, shard
from distdl_rma.layers.sources.reading import read_box
from tests.fuzz.outcomes import folder_of_all

# Ranks that raise one assertion together can go on.
COLLECTIVE = True
REFUSED: Counter[str] = Counter()
WHOLE = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
SECONDS, MEMORY_NBYTES, ADDRESSES_NBYTES = 200, 1 << 30, 6 << 30
# Of a box that is read, in each dimension, and elements that all ranks read.
EXTENT, ELEMENTS = 16, 1 << 20
# Extents and counts, none of which could be allocated and is not refused.
NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 15,
    1 << 31,
    *((1 << bits) - 1 for bits in (31, 32, 63)),
    1 << 50,
    1 << 62,
]
HUGE = [0, -1, 1, 3, 9, 1 << 50, 1 << 62, 1 << 63, 1 << 70, 2.5, None, "x", [], [4, 6], {}, True]
MARK = "owned"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}/{MARK}",)


def check(P_world, comm, seed):
    """Make one file, damage it, and read it."""
    rng = random.Random(seed)
    name = rng.choice([*FORMATS])
    package, make = FORMATS[name]
    if package is not None and find_spec(package) is None:
        REFUSED[f"{name}: {package} is not installed"] += 1
        return
    case, logs = f"{name} {seed}", logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with folder_of_all(comm) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, intact, kind, text = comm.bcast(_first(make, rng, folder) if comm.rank == 0 else None)
            if kind == "signal" and name in HDF5:
                REFUSED[f"{name}: {text} in libhdf5"] += 1
                return
            assert kind in ("values", "refused"), f"{case}: {kind}: {text}"
            assert not intact or kind == "values", f"{case}: an intact file was refused: {text}"
            if name in HDF5 or text == "many":
                return
            _on_all(comm, path, kind, text, case)
    finally:
        logging.disable(logs)


def _first(make, rng, folder):
    path = make(rng, folder)
    if intact := rng.random() < 0.1:
        shutil.rmtree(folder)
        folder.mkdir()
        path = make(None, folder)
    return path, intact, *_in_fork(path, folder, intact)


def _on_all(comm, path, kind, text, case):
    try:
        dims = len(open_array(path).shape)
        shard((comm.size, *[1] * max(dims - 1, 0)), str(path))
        found = "values", ""
    except DistdlError as error:
        found = "refused", str(error)
    except Exception as error:
        found = type(error).__name__, str(error)
    every = comm.allgather(found)
    # Of a scalar, grids of several ranks are refused.
    assert len({each for each, _ in every}) == 1, f"{case}: {every}"
    assert every[0][0] in ("values", "refused"), f"{case}: {every[0]}"
    assert every[0][0] == kind or kind == "values", f"{case}: all ranks read what is refused: {text}"


def _in_fork(path, folder, intact):
    """How reading ends in a process of its own: "values", "refused" or a fault, and words."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reads)
            os.write(writes, pickle.dumps(_bounded(path, intact))[: 1 << 16])
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as answer:  # noqa: PTH123
        raw = answer.read()
    status = os.waitpid(process, 0)[1]
    if (folder / MARK).exists():
        return "code ran", str(path)
    if raw:
        return pickle.loads(raw)
    ended = "too long" if os.WTERMSIG(status) == signal.SIGALRM else "signal"
    return ended, f"signal {os.WTERMSIG(status)}"


def _bounded(path, intact):
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + ADDRESSES_NBYTES,) * 2)
    try:
        source = open_array(path)
        shape = tuple(source.shape)
        box = tuple(slice(0, n if intact else min(n, EXTENT)) for n in shape)
        found = read_box(source, box)
        if intact and not np.array_equal(found.numpy().squeeze(), WHOLE):
            return "wrong values", str(found)
        many = np.prod([float(n) for n in shape]) > ELEMENTS
        ended = "values", "many" if many else str(shape)
    except DistdlError as error:
        named = path.name in str(error)
        ended = "refused" if named else "does not name the file", str(error)[:2000]
    except Exception as error:
        ended = f"raw {type(error).__name__}", str(error)[:2000]
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return ended if grown < MEMORY_NBYTES else ("memory", f"{grown} bytes, {ended}")


def damaged(rng, raw, head=600):
    """The bytes with a few changes, most of them in the head; as they are if there is no ``rng``."""
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4]) if rng else 0):
        most = min(len(raw), head) if rng.random() < 0.8 else len(raw)
        at, how = rng.randrange(max(most, 1)), rng.random()
        if how < 0.5 and raw:
            raw[at] ^= 1 << rng.randrange(8)
        elif how < 0.85:
            form = rng.choice("<>") + rng.choice("HIQf")
            width, most = struct.calcsize(form), 1 << 8 * struct.calcsize(form)
            number = rng.choice([1e30, float("nan")]) if form[1] == "f" else rng.choice(NUMBERS) % most
            at -= at % width
            raw[at : at + width] = struct.pack(form, number)
        elif how < 0.93:
            del raw[at : at + rng.choice([1, 4, 16, len(raw)])]
        else:
            raw[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
    return bytes(raw)


def _npy(rng, folder):
    stream = io.BytesIO()
    np.save(stream, WHOLE)
    raw, path = stream.getvalue(), folder / "x.npy"
    if rng and rng.random() < 0.5:
        kind = rng.choice(
            ["<f4", "|O", "|V0", "<U0", "<U1", "|V4", "<f16", "zz", "|b1", [("a", "<f4"), ("b", "|O")]]
        )
        shape = tuple(rng.choice([*NUMBERS, 1 << 70, 2.5, "x"]) for _ in range(rng.choice([0, 1, 2, 3, 65])))
        order = rng.choice([True, False, 1])
        header = f"{{'descr': {kind!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n"
        version, length = rng.choice([1, 1, 2, 3, 9]), rng.choice([len(header)] * 4 + [0, 60000, 0xFFFFFFF0])
        width = 2 if version == 1 else 4
        raw = b"\x93NUMPY" + bytes((version, 0)) + (length & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        raw += header.encode() + WHOLE.tobytes()
        path.write_bytes(raw)
        return path
    path.write_bytes(damaged(rng, raw, 128))
    return path


def _hdf5(rng, folder):
    import h5py

    chunked = rng and rng.random() < 0.5
    with h5py.File(path := folder / "x.h5", "w") as file:
        options = {"chunks": (2, 3, 4), "compression": "gzip"} if chunked else {}
        file.create_dataset("a/x", data=WHOLE, **options).attrs["scale_factor"] = np.float32(1)
    path.write_bytes(damaged(rng, path.read_bytes(), 4000))
    return path


def _netcdf(rng, folder, version=None):
    import netCDF4

    kinds = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]
    version = version or (rng.choice(kinds) if rng else kinds[0])
    with netCDF4.Dataset(path := folder / "x.nc", "w", format=version) as file:
        for name, extent in zip("yxz", WHOLE.shape, strict=True):
            file.createDimension(name, None if name == "y" and rng and rng.random() < 0.5 else extent)
        x = file.createVariable("v", "f4", ("y", "x", "z"))
        x.units = "m"
        x[...] = WHOLE
    path.write_bytes(damaged(rng, path.read_bytes(), 240 if version in kinds else 4000))
    return path


def _tiff(rng, folder):
    import tifffile

    options = rng.choice([{}, {"tile": (16, 16), "compression": "zlib"}, {"bigtiff": True}]) if rng else {}
    tifffile.imwrite(path := folder / "x.tif", WHOLE, photometric="minisblack", **options)
    path.write_bytes(damaged(rng, path.read_bytes()))
    return path


def _nifti(rng, folder):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(WHOLE, np.eye(4)), path := folder / "x.nii")
    path.write_bytes(damaged(rng, path.read_bytes(), 352))
    return path


def _zarr(rng, folder):
    import zarr

    version = rng.choice([2, 3]) if rng else 3
    path = folder / "x.zarr"
    zarr.create_array(str(path), data=WHOLE, chunks=(2, 5, 3), zarr_format=version)
    if rng is None:
        return path
    header = path / ("zarr.json" if version == 3 else ".zarray")
    files = sorted(each for each in path.rglob("*") if each.is_file())
    how = rng.random()
    if how < 0.6:
        meta = json.loads(header.read_text())
        for _ in range(rng.choice([1, 1, 2])):
            _change(rng, meta)
        header.write_text(json.dumps(meta))
    elif how < 0.75:
        codec = {"id": "pickle"}
        filters = {"filters": [codec]}
        changes = rng.choice([filters, {"compressor": codec}, {"dtype": "|O", **filters}])
        if version == 3:
            changes = {"codecs": [{"name": rng.choice(["pickle", "numcodecs.pickle"]), "configuration": {}}]}
        header.write_text(json.dumps(json.loads(header.read_text()) | changes))
        for each in files:
            if each != header and not each.name.startswith("."):
                each.write_bytes(pickle.dumps(Evil(folder)))
    else:
        target = rng.choice(files)
        if rng.random() < 0.2:
            target.unlink()
        else:
            target.write_bytes(damaged(rng, target.read_bytes()))
    return path


def _change(rng, meta):
    # One value anywhere in the header.
    places, todo = [], [meta]
    while todo:
        one = todo.pop()
        for key in one if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], (dict, list)):
                todo.append(one[key])
    one, key = rng.choice(places)
    one[key] = rng.choice(HUGE)


# By name: the package that reads it, and what makes it; of those that are files of HDF5.
FORMATS = {
    "npy": (None, _npy),
    "hdf5": ("h5py", _hdf5),
    "netcdf": ("netCDF4", _netcdf),
    "netcdf 4": ("netCDF4", lambda rng, folder: _netcdf(rng, folder, "NETCDF4")),
    "tiff": ("tifffile", _tiff),
    "nifti": ("nibabel", _nifti),
    "zarr": ("zarr", _zarr),
}
HDF5 = {"hdf5", "netcdf 4"}

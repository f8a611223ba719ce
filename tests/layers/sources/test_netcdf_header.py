"""The end of the elements is that of the file, whatever its variables are; truncated files are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distdl_rma import DataError, open_array
from distdl_rma.layers.sources.netcdf_header import check_netcdf_header

VERSIONS = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]
_PADDING = 3


def written(path, version, seed):
    """A file with fixed variables and records of several types, names and attributes."""
    netcdf, draw = pytest.importorskip("netCDF4"), np.random.default_rng(seed)
    kinds = ["i1", "i2", "i4", "f4", "f8"] + ["u1", "u2", "u4", "i8", "u8"] * (version == VERSIONS[2])
    with netcdf.Dataset(path, "w", format=version) as file:
        file.note, file.levels = "n" * int(draw.integers(1, 6)), np.arange(3, dtype="i2")
        file.createDimension("record", None)
        for name, extent in (("y", 3), ("length", 5)):
            file.createDimension(name, extent)
        for number in range(draw.integers(1, 5)):
            dims = ["record", "y", "length"][draw.integers(0, 3) :]
            one = file.createVariable("v" * (number + 1), draw.choice(kinds), dims)
            one.units = "m" * int(draw.integers(1, 6))
            extents = [file.dimensions[name].size or 3 for name in dims]
            one[tuple(map(slice, extents))] = np.ones(extents)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(20))
def test_a_file_without_its_last_element_is_refused(version, seed, tmp_path):
    path = str(tmp_path / "x.nc")
    written(path, version, seed)
    check_netcdf_header(path)
    nbytes = Path(path).stat().st_size
    os.truncate(path, nbytes - 1 - _PADDING)
    with pytest.raises(DataError, match="the file is truncated") as refused:
        check_netcdf_header(path)
    end = re.search(r"elements end at byte (\d+);", str(refused.value))
    assert end is not None and nbytes - _PADDING <= int(end[1]) <= nbytes
    with pytest.raises(DataError, match="the file is truncated"):
        open_array(path, "v")


OPENED = """
import os, sys, netCDF4
from pathlib import Path
from distdl_rma import DistdlError, open_array
from distdl_rma.layers.sources.reading import read_box
path, flips = sys.argv[1], map(int, sys.argv[2:])
raw = Path(path).read_bytes()
for flip in flips:
    damaged = bytearray(raw)
    damaged[flip // 8] ^= 1 << flip % 8
    Path(path).write_bytes(damaged)
    print(flip, flush=True)
    try:
        source = open_array(path, "v")
        read_box(source, tuple(slice(0, n) for n in source.shape))
    except DistdlError as error:
        assert path in str(error), error
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_flipped_bit_of_a_header_does_not_end_the_process(version, tmp_path):
    path = str(tmp_path / "x.nc")
    written(path, version, 3)
    # The first ones are counts and the lists of dimensions; of these every third bit.
    flips = [str(bit) for bit in range(24, 8 * 160, 3)]
    memory = ("prlimit", f"--as={8 << 30}")
    done = subprocess.run(
        [*memory, sys.executable, "-c", OPENED, path, *flips],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + done.stderr.splitlines()[-5:]

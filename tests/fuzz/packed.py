"""Random packed arrays of NetCDF, unpacked by the ranks, against numpy on the whole; of others, refused."""

import random
from collections import Counter
from importlib.util import find_spec

import numpy as np

from distdl_rma import DistdlError, ShapeError, shard
from tests.fuzz.outcomes import folder_of_all
from tests.layers.sources.test_packed import netcdf

REFUSED: Counter[str] = Counter()
# Formats by the package that writes them.
FORMATS = {"nc": "netCDF4", "h5": "h5py", "zarr": "zarr"}
STORED = ["i1", "u1", "i2", "u2", "i4", "i8", "f4", "f8", ">i2", ">f4"]


def attributes(rng, stored):
    """Attributes at random, as numbers of numpy with a type."""
    found, kind = {}, stored.dtype.type
    real = rng.choice([np.float32, np.float64])
    if rng.random() < 0.6:
        found["scale_factor"] = rng.choice([real(0.25), real(-2), np.int32(3)])
    if rng.random() < 0.5:
        found["add_offset"] = rng.choice([real(-0.5), real(100), np.int32(-7)])
    for name, chance in (("_FillValue", 0.4), ("missing_value", 0.4), ("valid_min", 0.2)):
        if rng.random() < chance:
            found[name] = kind(rng.choice(list(stored.flat)))
    if rng.random() < 0.2:
        found["valid_range"] = np.array(sorted(rng.sample(range(50), 2)), kind)
    if stored.dtype.kind == "i" and rng.random() < 0.2:
        found["_Unsigned"] = "true"
    return found


def decoded(stored, given):
    """What the whole stands for; NaN, or a mask for integers."""
    x = np.array(stored, stored.dtype.newbyteorder("="))
    unsigned = x.dtype.str.replace("i", "u") if "_Unsigned" in given else x.dtype.str

    def stored_as(number):
        return np.array(number, x.dtype).view(unsigned)

    x = x.view(unsigned)
    low, high = given.get("valid_range", (given.get("valid_min"), None))
    missing = np.zeros(x.shape, bool)
    for name in ("_FillValue", "missing_value"):
        if name in given:
            missing |= x == stored_as(given[name])
    if low is not None:
        missing |= x < stored_as(low)
    if high is not None:
        missing |= x > stored_as(high)
    for name, operation in (("scale_factor", np.multiply), ("add_offset", np.add)):
        if name in given:
            x = operation(x, np.array([given[name]]))
    if x.dtype.kind == "f":
        return np.where(missing, x.dtype.type(np.nan), x)
    return np.ma.array(x, mask=missing)


def written(path, stored, given, version):
    """Write the stored elements and their attributes."""
    if path.suffix == ".nc":
        netcdf(path, stored.astype(stored.dtype.newbyteorder("=")), given)
    elif path.suffix == ".h5":
        import h5py

        with h5py.File(path, "w") as file:
            chunks = tuple(min(n, 3) for n in stored.shape) if version == 2 else None
            file.create_dataset("x", data=stored, chunks=chunks).attrs.update(given)
    else:
        import zarr

        x = zarr.create_array(str(path), data=stored, chunks=(3,) * stored.ndim, zarr_format=version)
        x.attrs.update({name: getattr(value, "tolist", value.__str__)() for name, value in given.items()})


def check(P_world, comm, seed):
    """Compare one array in one format with the whole."""
    rng = random.Random(seed)
    suffix = rng.choice([*FORMATS])
    if find_spec(FORMATS[suffix]) is None:
        REFUSED[f"{suffix}: {FORMATS[suffix]} is not installed"] += 1
        return
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
    draws = np.random.default_rng(seed)
    stored = draws.integers(0 if rng.random() < 0.5 else -50, 50, shape)
    stored = np.abs(stored).astype(kind) if (kind := rng.choice(STORED))[-2] == "u" else stored.astype(kind)
    given = attributes(rng, stored)
    if suffix == "zarr":
        # JSON has one type of floats, and one of integers.
        wide = {np.dtype("f4"): np.float64, np.dtype("i4"): np.int64}
        given |= {
            name: wide.get(given[name].dtype, np.float64)(given[name])
            for name in ("scale_factor", "add_offset") if name in given
        }  # fmt: skip
    wanted, version = decoded(stored, given), rng.choice([2, 3])
    with folder_of_all(comm) as folder:
        path = folder / f"x.{suffix}"
        if comm.rank == 0:
            written(path, stored, given, version)
        comm.Barrier()
        grid = [1] * len(shape)
        grid[rng.randrange(len(shape))] = comm.size
        case = f"{suffix} {version} {stored.dtype} {given}"
        try:
            x = shard(tuple(grid), str(path))
        except ShapeError as error:
            if np.ma.is_masked(wanted):
                return
            raise AssertionError(f"{case}: {error}") from error
        except DistdlError as error:
            # NetCDF4 fails at some limits of unsigned bytes.
            if (suffix != "nc" and given) or "Cannot convert fill_value" in str(error):
                return
            raise AssertionError(f"{case}: {error}") from error
        assert suffix == "nc" or not given, f"{case}: what is stored was read"
        assert not np.ma.is_masked(wanted), f"{case}: missing integers were read"
        block, found = np.asarray(wanted)[x.decomposition.slices()], x.to_local().numpy()
        assert found.dtype == block.dtype, f"{case}: {found.dtype}, wanted {block.dtype}"
        np.testing.assert_array_equal(found, block, case)

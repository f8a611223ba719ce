"""Read a box of anything that is sliced like an array, as a tensor.

``source[box]`` gives what its library wants to give; a tensor in new memory comes out::

    numpy, a raw file     array            taken as it is, if nobody else refers to it; else copied
    h5py, Zarr            array            likewise
    netCDF4               masked array     missing floats are NaN; missing integers are an error
    tensorstore           a promise        .read().result()
    dask, xarray          a graph          .compute(scheduler="synchronous")
    torch                 a tensor         copied
    others                whatever         DLPack, else __array__

No library is imported to find out which one it is: a source is asked for what it can do, and for the name of
its package where only that tells. The copy that is saved where nobody else refers to an array is a whole
block, which may be half of what a rank has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.layers.dtypes import BIT_WORDS, DTYPES, NUMPY
from distdl_rma.layers.sources.hdf5 import LOCKED, hdf5_lock

Slices = tuple[slice, ...]
# References to an array that only one name knows, while they are counted: the name, and the argument of the
# function that counts.
_ALONE = 2


@dataclass(frozen=True)
class Source:
    """A source that a function of the user reads; sliced like an array.

    Parameters
    ----------
    shape
        Shape of the whole array.
    dtype
        Type of its elements, of numpy or torch.
    read
        Called with one slice for each dimension, with start, stop and a positive step inside the shape. It
        returns this part as an array or tensor, in any memory. It is not called for a part without elements.
    chunks
        Extents of the pieces that are read as a whole, for the warning about grids that cut them; None if
        there are none.

    Examples
    --------
    >>> def read(box):  # one slice for each dimension
    ...     return sum(np.ogrid[box])
    >>> table = Source(shape=(6, 2), dtype=np.int64, read=read)
    >>> shard((2, 1), table).to_local()
    tensor([[0, 1],
            [1, 2],
            [2, 3]])
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[Slices], Any]
    chunks: tuple[int, ...] | None = None

    def __getitem__(self, box: Slices) -> Any:
        """The part that ``read`` returns."""
        extents = [len(range(*each.indices(n))) for each, n in zip(box, self.shape, strict=True)]
        if 0 not in extents:
            return self.read(box)
        torchs = isinstance(self.dtype, torch.dtype)
        return torch.empty(extents, dtype=self.dtype) if torchs else np.empty(extents, self.dtype)


@dataclass(frozen=True)
class Sink:
    """A sink that functions of the user write; ``sink[box] = array``. A context, which finishes it.

    Parameters
    ----------
    shape
        Shape of the whole array.
    dtype
        Type of its elements, of numpy or torch.
    write
        Called with one slice for each dimension and the array that belongs there. The slices have start and
        stop, and no step. Boxes of different ranks do not overlap, and several ranks write at once.
    finish
        Called on every rank at the end of the context, unless it ends by an error.
    chunks
        Extents of the pieces that one rank alone may write at a time; None if any two boxes are independent.

    Examples
    --------
    >>> whole = np.zeros((6, 2), np.float32)
    >>> def write(box, block):
    ...     whole[box] = block
    >>> with Sink(shape=(6, 2), dtype=np.float32, write=write) as sink:
    ...     write_shards(sink, shard((2, 1), torch.ones(6, 2)))
    >>> whole.sum(1)  # each rank has written its rows
    array([2., 2., 2., 0., 0., 0.], dtype=float32)
    """

    shape: tuple[int, ...]
    dtype: Any
    write: Callable[[Slices, NDArray[Any]], None]
    finish: Callable[[], None] | None = None
    chunks: tuple[int, ...] | None = None

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write one box."""
        self.write(box, values)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self.finish is not None:
            self.finish()


def read_box(source: Any, box: Sequence[slice]) -> torch.Tensor:
    """A box of a source as a contiguous CPU tensor, in new memory and native byte order; local, blocking.

    The source is sliced once. A tensor or a numpy array is taken as it comes. Other results become one by the
    first that they have: ``.read().result()`` (tensorstore), ``.compute(scheduler="synchronous")`` (dask),
    DLPack, ``__array__``. A result that nobody else refers to is not copied.
    Calls of libraries that may read HDF5 or NetCDF wait for each other in a process. The box has one slice
    for each dimension, with a positive step, and may be empty. Masked floats become NaN.

    ``ArgumentError`` if the slices do not fit the source. ``ShapeError`` if the source returns another shape,
    elements that torch does not have, or integers of which some are masked.
    """
    place, wanted = placed(source, box)
    with hdf5_lock(library_of(source) in LOCKED):
        part, new = source[in_domain(source, place)], False
        if not isinstance(part, (torch.Tensor, np.ndarray)):
            part, new = _in_memory(part)
    if tuple(part.shape) != wanted:
        raise ShapeError(
            f"{label(source)}: asked for {text_of(place)}, of shape {wanted}, but got {tuple(part.shape)};"
            " has the file changed since it was opened?"
        )
    if isinstance(part, torch.Tensor):
        found = part.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
    else:
        if isinstance(part, np.ma.MaskedArray):
            part = _filled(source, part)
        # The slicing has made this array for us, unless it shows the memory of another one.
        if new or (part.base is None and part.flags.writeable and sys.getrefcount(part) <= _ALONE):
            if not part.dtype.isnative:
                part = part.byteswap(inplace=True).view(part.dtype.newbyteorder("="))
            found = _tensor(source, np.asarray(part, order="C"))
        else:
            found = _tensor(source, np.array(part, part.dtype.newbyteorder("="), order="C"))
    if isinstance(source, Source) and found.dtype != (wants := torch_dtype(source, source.dtype)):
        raise ShapeError(
            f"a Source of {wants}: read() returned {found.dtype}; convert there, or say so in dtype"
        )
    return found


def placed(source: Any, box: Sequence[slice]) -> tuple[Slices, tuple[int, ...]]:
    """The slices with all numbers filled in, and the shape of what they select.

    ``ArgumentError`` if they are not one for each dimension, inside of the source, with positive steps.
    """
    shape, place, extents = tuple(source.shape), [], []
    box = box if isinstance(box, (tuple, list)) else (box,)
    if len(box) != len(shape) or not all(isinstance(each, slice) for each in box):
        raise ArgumentError(f"{label(source)} has shape {shape}: a box has a slice for each, got {box!r}")
    for each, n in zip(box, shape, strict=True):
        start, stop = each.start or 0, n if each.stop is None else each.stop
        step = 1 if each.step is None else each.step
        if not (0 <= start <= stop <= n and step > 0):
            raise ArgumentError(
                f"{label(source)} has shape {shape}: slices lie inside, from start to stop, with positive"
                f" steps, got {text_of(box)}"
            )
        place.append(slice(start, stop, step) if step > 1 else slice(start, stop))
        extents.append(len(range(start, stop, step)))
    return tuple(place), tuple(extents)


def in_domain(source: Any, box: Slices) -> Slices:
    """The box in the indices of a source, which begin at 0 but for some arrays of tensorstore.

    Everywhere else in this package a box counts from 0, whatever the source does.
    """
    if library_of(source) != "tensorstore":
        return box
    starts = source.domain.origin
    return tuple(slice(a.start + at, a.stop + at, a.step) for a, at in zip(box, starts, strict=True))


def label(source: Any) -> str:
    """What messages call a source: its file, or its kind.

    Libraries call the file ``path`` or ``filename``, and a message about one of a thousand files is of use
    only with its name.
    """
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    for name in ("path", "filename"):
        # netCDF4 knows this name of a variable, but has no value for it.
        with suppress(KeyError):
            file = getattr(source, name, None)
            if isinstance(file, (str, os.PathLike)) and str(file):
                return str(file)
    home = "" if (library := library_of(source)) in ("distdl_rma", "builtins") else f"{library}."
    return f"a {home}{type(source).__name__}"


def text_of(box: Sequence[slice]) -> str:
    """A box in messages."""
    parts = (f"{each.start}:{each.stop}{f':{each.step}' if each.step else ''}" for each in box)
    return f"[{', '.join(parts)}]"


def library_of(source: Any) -> str:
    """The package that a source or a sink is of; it need not be imported for the question."""
    return type(source).__module__.partition(".")[0]


def _in_memory(part: Any) -> tuple[torch.Tensor | NDArray[Any], bool]:
    # What a slicing stands for, and whether this is in memory that nothing else refers to. A graph of dask is
    # computed here and now: its threads would call HDF5 without the lock that this thread has.
    if callable(getattr(part, "read", None)):
        return part.read().result(), True
    if callable(getattr(part, "compute", None)):
        part = part.compute(scheduler="synchronous")
    if not isinstance(part, (torch.Tensor, np.ndarray)):
        part = torch.utils.dlpack.from_dlpack(part) if hasattr(part, "__dlpack__") else np.asarray(part)
    return part, False


def _filled(source: Any, part: np.ma.MaskedArray[Any, Any]) -> NDArray[Any]:
    if not np.ma.is_masked(part):
        return part.data
    if part.dtype.kind not in "fc":
        raise ShapeError(
            f"{label(source)}: some elements are masked, and {part.dtype} has no NaN for them; to get the"
            " stored ones, pass the array that its library opens, of netCDF4 after set_auto_mask(False)"
        )
    return np.asarray(part.filled(np.nan))


def torch_dtype(source: Any, dtype: Any) -> torch.dtype:
    """Torch's type for the elements of a source; ``ShapeError`` if it has none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return _tensor(source, np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype


def _tensor(source: Any, values: NDArray[Any]) -> torch.Tensor:
    if values.dtype in NUMPY.values():
        return torch.from_numpy(values)
    # Types that numpy gets from another package, such as bfloat16.
    dtype = getattr(torch, values.dtype.name, None)
    if dtype in DTYPES:
        return torch.from_numpy(values.view(BIT_WORDS[values.dtype.itemsize][1])).view(dtype)
    raise ShapeError(
        f"{label(source)}: its elements are {values.dtype}, which torch does not have; it has"
        f" {', '.join(map(str, NUMPY.values()))}"
    )

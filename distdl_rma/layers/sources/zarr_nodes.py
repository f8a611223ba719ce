"""Arrays of Zarr: in a folder, on a server or in a zip, and those that OME-Zarr shows as images.

A group of OME-Zarr says which of its arrays are levels of an image, from the full resolution on::

    scan.ome.zarr       group, "multiscales": 0, 1       scan.ome.zarr            level 0
      0, 1              arrays                           scan.ome.zarr::1         level 1, as scan.ome.zarr/1
      labels/nuclei     group, "multiscales": 0, 1       ...::labels/nuclei       level 0 of the label image

So a path leads to a group or an array, and from a group its attributes lead on, as long as they name one
thing alone; else all are listed. What the dimensions are is found from the array: its group, or the one
above, names it as a level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any
from zipfile import ZIP_STORED, ZipFile

from distdl_rma.errors import ArgumentError, DataError, UnsupportedError
from distdl_rma.layers.sources.dimensions import Dimensions, of_attributes, of_level, ome
from distdl_rma.layers.sources.packed import check_stored
from distdl_rma.layers.sources.remote import filesystem, is_url, needed, opened

# A store, and what is within it.
_WITHIN = re.compile(r"(.+\.(?:zarr|zip|ozx))/(.+)", re.IGNORECASE | re.DOTALL)
_NODES = ("zarr.json", ".zarray", ".zgroup")
# Some codecs take no more, nor does a member of a zip that is decompressed as a whole.
_ZARR_2, _CHUNK_NBYTES = 2, (2 << 30) - 1
_MISSING = (FileNotFoundError, KeyError)
# A level is at most so far below the group that names it.
_ABOVE = 2


def store_of(path: str) -> tuple[str, str]:
    """The path of a store of Zarr, and the path within it, which may be empty."""
    found = _WITHIN.fullmatch(path)
    return (found[1], found[2]) if found else (path, "")


def chosen(path: str, names: Iterable[str], name: str | None) -> str:
    """The name of one array in a file that has these.

    A file with one array needs no name; a wrong name gets the list of right ones.
    """
    known = sorted(names)
    if name is None and len(known) == 1:
        return known[0]
    if name is None or name.strip("/") not in known:
        wrong = "which one?" if name is None else f"none is called {name!r}:"
        raise ArgumentError(
            f"{path} has {len(known)} arrays, {wrong} '{path}::NAME' with NAME one of {known}"
        )
    return name.strip("/")


def zarr_array(path: str, name: str | None) -> tuple[Any, Dimensions]:
    """An array of Zarr, and its dimensions."""
    zarr, (home, inner) = needed("zarr", "zarr"), store_of(path)
    store, root = _store(zarr, home)

    def node(*parts: str) -> Any:
        place = "/".join(part.strip("/") for part in (root, *parts) if part.strip("/"))
        return zarr.open(store, path=place, mode="r")

    parts = f"{inner}/{name or ''}".strip("/").split("/")
    try:
        found = node(*parts)
    except _MISSING:
        if name is not None:
            chosen(path, _names(zarr, node(inner), every=True), name)
        raise
    while isinstance(found, zarr.Group):
        names, before = _names(zarr, found), f"{name.strip('/')}/" if name else ""
        # A name without letters would lead here again.
        name = chosen(path, (before + each.strip("/") for each in names if each.strip("/")), None)
        found = node(inner, name)
    _check(path, found)
    attributes, metadata, dims = found.attrs.asdict(), found.metadata, len(found.shape)
    where = _of_image(node, found.path.removeprefix(root).strip("/"), dims)
    if where is None:
        names = getattr(metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS")
        where = of_attributes(dims, names, attributes)
    if "_ARRAY_DIMENSIONS" in attributes and metadata.zarr_format == _ZARR_2:
        # There xarray writes its fill value to this place.
        attributes.setdefault("_FillValue", found.fill_value)
    check_stored(path, found, attributes)
    return found, where


def _store(zarr: Any, path: str) -> tuple[Any, str]:
    # What zarr opens, and where in it the hierarchy begins.
    if path.lower().endswith((".zip", ".ozx")):
        return _zip_store(zarr, path)
    return (_of_fsspec(zarr, *filesystem(path)) if is_url(path) else path), ""


def _of_fsspec(zarr: Any, files: Any, place: str) -> Any:
    # Zarr's own store of a URL has connections that nobody closes. This one calls those of ``fsspec``, which
    # closes them, from threads.
    wrapper = needed("fsspec.implementations.asyn_wrapper", "remote").AsyncFileSystemWrapper
    return zarr.storage.FsspecStore(wrapper(files, asynchronous=True), read_only=True, path=place)


def _zip_store(zarr: Any, path: str) -> tuple[Any, str]:
    # Whoever zips a folder may zip it with its name, so that the hierarchy begins there.
    with opened(path) as file:
        # An error of a server is one, and no sign of another kind of file, for which ``zipfile`` takes it.
        file.read(1)
        with ZipFile(file) as archive:
            members = archive.infolist()
    places = (each.filename.rpartition("/") for each in members)
    homes = [home for home, _, last in places if last in _NODES]
    # A zip of several hierarchies has a name for each.
    root = min(homes, key=len, default="")
    root = root if all(f"{home}/".startswith(f"{root}/") for home in homes) else ""
    packed = [each for each in members if each.compress_type != ZIP_STORED]
    large = [each.filename for each in packed if each.file_size > _CHUNK_NBYTES]
    if not homes:
        raise UnsupportedError(
            f"{path}: an archive without an array of Zarr has no random access, every rank would read all of"
            f" it; convert it once: unzip -d {path[: -len('.zip')]} {path}"
        )
    if large:
        raise DataError(
            f"{path}: {large[0]} becomes more than {_CHUNK_NBYTES} bytes when it is read; zip it without"
            " compression: zip -0"
        )
    if not is_url(path):
        return zarr.storage.ZipStore(path, mode="r"), root
    files = needed("fsspec.implementations.zip", "remote").ZipFileSystem(opened(path))
    return _of_fsspec(zarr, files, ""), root


def _names(zarr: Any, group: Any, every: bool = False) -> list[str]:
    # What a group leads to: what OME-Zarr says in it, else its images, and arrays that are none of these. Of
    # an image the full resolution, or every level.
    if isinstance(group, zarr.Array):
        return []
    facts = ome(group.attrs.asdict())
    if images := facts.get("multiscales"):
        levels = [[level["path"] for level in image["datasets"]] for image in images]
        return [path for image in levels for path in (image if every else image[:1])]
    for kind, members in (("plate", "wells"), ("well", "images")):
        if kind in facts:
            return [each["path"] for each in facts[kind][members]]
    nodes = dict(group.members(max_depth=None))
    arrays = [key for key, one in nodes.items() if isinstance(one, zarr.Array)]
    found = [key for key, one in nodes.items() if "multiscales" in ome(one.attrs.asdict())]
    within = tuple(f"{key}/" for key in found)
    return [key for key in (*found, *arrays) if not key.startswith(within)]


def _of_image(node: Any, path: str, dims: int) -> Dimensions | None:
    # By the group that names the array as a level of an image.
    parts = path.split("/") if path else []
    for count in range(1, min(_ABOVE, len(parts)) + 1):
        try:
            group = node(*parts[:-count])
        except _MISSING:
            continue
        if found := of_level(group.attrs.asdict(), "/".join(parts[-count:]), dims):
            return found
    return None


def _check(path: str, found: Any) -> None:
    codecs = repr((found.filters, found.compressors))
    if "pickle" in codecs.lower():
        raise DataError(
            f"{path}: chunks by {codecs}, whose pickles may run any code; write it by other codecs"
        )
    if (nbytes := prod(found.chunks) * found.dtype.itemsize) > _CHUNK_NBYTES and (
        found.filters or found.compressors
    ):
        raise DataError(
            f"{path}: a compressed chunk becomes {nbytes} bytes, of which {_CHUNK_NBYTES} bytes are read at"
            " most; write it by smaller chunks"
        )

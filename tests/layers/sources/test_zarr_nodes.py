"""Paths lead to arrays of Zarr in folders, zips and on servers, as OME-Zarr says."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest
import zarr

from distdl_rma import ArgumentError, DataError, UnsupportedError, open_array
from distdl_rma.layers.sources import zarr_nodes
from tests.layers.sources.formats import holds_in_a_fork, whole
from tests.layers.sources.server import serving

X = np.arange(2 * 3 * 8 * 5, dtype=np.int16).reshape(2, 3, 8, 5)
UNITS = (None, *["micrometer"] * 3)
AXES = [{"name": "c", "type": "channel"}]
AXES += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
ALL = ("c", "z", "y", "x"), (1.0, 2.0, 1.0, 1.0), (0.0, 4.0, 1.0, 2.0), UNITS


def image(group, levels=("0", "1"), axes=AXES, x=X, **packing):
    """Makes an image of a group: two levels, with a scale and a translation of each, and one of both."""
    datasets = []
    for number, path in enumerate(levels):
        level = x[..., :: 1 + number]
        group.create_array(path, data=level, chunks=(2,) * x.ndim).attrs.update(packing)
        steps = [
            {"type": "scale", "scale": [1.0] * (x.ndim - 1) + [1.0 + number]},
            {"type": "translation", "translation": [0.0] * (x.ndim - 3) + [2.0, 1.0, 2.0]},
        ]
        datasets.append({"path": path, "coordinateTransformations": steps})
    both = [{"type": "scale", "scale": [1.0] * (x.ndim - 3) + [2.0, 1.0, 1.0]}]
    facts = {"multiscales": [{"axes": axes, "datasets": datasets, "coordinateTransformations": both}]}
    if group.metadata.zarr_format == 3:
        group.attrs["ome"] = facts | {"version": "0.5"}
    else:
        facts["multiscales"][0]["version"] = "0.4"
        group.attrs.update(facts)
    return group


def scan(folder, version=3, **options):
    path = folder / "scan.ome.zarr"
    group = image(zarr.open_group(str(path), mode="w", zarr_format=version), **options)
    labels = group.create_group("labels")
    labels.attrs["labels"] = ["nuclei"]
    image(labels.create_group("nuclei"), axes=AXES[1:], x=X[0])
    return path


def zipped(path, to, home="", how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(to, "w", how) as file:
        for one in path.rglob("*"):
            if one.is_file():
                file.write(one, f"{home}{one.relative_to(path)}")
    return to


def seen(source):
    return source.axes, source.spacing, source.origin, source.units


def doors(folder, version=3, **options):
    """The same image as a folder and as zips of it."""
    path = scan(folder, version, **options)
    yield path
    yield zipped(path, folder / "scan.zarr.zip", how=zipfile.ZIP_DEFLATED)
    yield zipped(path, folder / "named.zip", "scan.ome.zarr/")
    yield zipped(path, folder / "scan.ozx")


NAMES = {
    "": (X, 1.0), "::0": (X, 1.0), "/0": (X, 1.0), "::1": (X[..., ::2], 2.0), "/1": (X[..., ::2], 2.0),
    "::labels/nuclei": (X[0], 1.0), "/labels::nuclei": (X[0], 1.0), "/labels": (X[0], 1.0),
    "::labels/nuclei/1": (X[0, ..., ::2], 2.0),
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_a_path_leads_to_a_level_of_an_image_with_its_axes(version, tmp_path):
    for path in doors(tmp_path, version):
        for name, (x, last) in NAMES.items():
            found = open_array(f"{path}{name}")
            for source in (found, pickle.loads(pickle.dumps(found))):
                assert np.array_equal(whole(source), x), (path, name)
                axes, spacing, *more = (each[-x.ndim :] for each in ALL)
                assert seen(source) == (axes, (*spacing[:-1], last), *more)


def test_levels_may_have_any_name(tmp_path):
    image(zarr.open_group(str(tmp_path / "x.zarr"), mode="w"), levels=("full", "s/half"))
    for name in ("", "/full", "::full"):
        assert open_array(f"{tmp_path / 'x.zarr'}{name}").shape == X.shape
    for name in ("::s/half", "/s/half"):
        found = open_array(f"{tmp_path / 'x.zarr'}{name}")
        assert (found.shape[-1], found.spacing[-1]) == (3, 2.0)
    with pytest.raises(ArgumentError, match=r"none is called '2'.*\['full', 's/half'\]"):
        open_array(f"{tmp_path / 'x.zarr'}::2")


def test_several_images_are_listed(tmp_path):
    root = zarr.open_group(str(tmp_path / "bf.zarr"), mode="w", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    root.create_group("OME")
    plate = zarr.open_group(str(tmp_path / "plate.zarr"), mode="w", zarr_format=2)
    plate.attrs["plate"] = {"wells": [{"path": "A/1"}, {"path": "B/1"}]}
    for name in ("0", "1"):
        image(root.create_group(name))
    for name in ("A/1", "B/1"):
        well = plate.create_group(name)
        well.attrs["well"] = {"images": [{"path": "0"}]}
        image(well.create_group("0"))
    for path, names in (("bf", r"\['0', '1'\]"), ("plate", r"\['A/1', 'B/1'\]")):
        with pytest.raises(ArgumentError, match=rf"{path}\.zarr has 2 arrays, which one.*{names}"):
            open_array(tmp_path / f"{path}.zarr")
    for name in ("bf.zarr::1", "plate.zarr::B/1", "plate.zarr/B/1/0"):
        assert seen(open_array(tmp_path / name)) == ALL


def test_packed_elements_are_refused_through_all_doors(tmp_path):
    with serving(tmp_path) as server:
        for path in doors(tmp_path, scale_factor=0.5):
            for place in (path, f"{server.url}/{path.name}"):
                with pytest.raises(DataError, match=r"has scale_factor=0\.5, so that elements stand for"):
                    open_array(place)


def test_metadata_that_does_not_fit_hides_no_array(tmp_path):
    path = scan(tmp_path)
    group = zarr.open_group(str(path), mode="r+")
    for axes in (AXES[:3], [{"type": "space"}] * 4, 5, None):
        facts = group.attrs["ome"]
        facts["multiscales"][0]["axes"] = axes
        group.attrs["ome"] = facts
        assert open_array(f"{path}::0").axes is None
        assert np.array_equal(whole(f"{path}::0"), X)


def test_dimensions_of_other_zarr_arrays_have_their_names(tmp_path):
    zarr.create_array(str(tmp_path / "x.zarr"), data=X, dimension_names=["c", "z", "y", "x"])
    assert seen(open_array(tmp_path / "x.zarr")) == (("c", "z", "y", "x"), None, None, None)
    old = zarr.create_array(str(tmp_path / "y.zarr"), data=X[0, 0], zarr_format=2, fill_value=None)
    old.attrs["_ARRAY_DIMENSIONS"] = ["lat", "lon"]
    assert open_array(tmp_path / "y.zarr").axes == ("lat", "lon")
    zarr.create_array(str(tmp_path / "z.zarr"), data=X, dimension_names=["c", None, "y", "x"])
    assert open_array(tmp_path / "z.zarr").axes is None


def test_archives_without_zarr_and_members_that_become_gigabytes_are_refused(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "x.npy").write_bytes(b"data")
    with pytest.raises(UnsupportedError, match=r"no random access.*unzip -d .*/x .*/x\.zip"):
        open_array(zipped(tmp_path / "x", tmp_path / "x.zip"))
    (tmp_path / "y.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be opened: BadZipFile"):
        open_array(tmp_path / "y.zip")
    path = scan(tmp_path)
    monkeypatch.setattr(zarr_nodes, "_CHUNK_NBYTES", 100)
    with pytest.raises(DataError, match=r"becomes more than 100 bytes.*zip -0"):
        open_array(zipped(path, tmp_path / "z.zip", how=zipfile.ZIP_DEFLATED))


def test_another_process_opens_a_zip_itself(tmp_path):
    source = open_array(zipped(scan(tmp_path), tmp_path / "x.ozx"))
    assert holds_in_a_fork(lambda: np.array_equal(whole(source), X))
    assert np.array_equal(whole(source), X)


def test_a_group_that_leads_to_itself_is_an_error(tmp_path):
    path = scan(tmp_path)
    group = zarr.open_group(str(path), mode="r+")
    for place in ("", "/", ".", "..", "../scan.ome.zarr", "labels/../0"):
        group.attrs["ome"] = {"multiscales": [{"datasets": [{"path": place}]}]}
        with pytest.raises((ArgumentError, DataError), match=r"has 0 arrays|cannot be opened"):
            open_array(path)


def test_a_zip_of_several_hierarchies_needs_a_name_and_one_of_a_mac_does_not(tmp_path):
    path = scan(tmp_path)
    with zipfile.ZipFile(zipped(path, tmp_path / "x.zip", "a/"), "a") as file:
        file.writestr("__MACOSX/a/._zarr.json", b"")
    assert np.array_equal(whole(tmp_path / "x.zip"), X)
    with zipfile.ZipFile(tmp_path / "x.zip", "a") as file:
        for one in path.rglob("*.json"):
            file.write(one, f"other/{one.relative_to(path)}")
    with pytest.raises(DataError, match="cannot be opened"):
        open_array(tmp_path / "x.zip")
    assert np.array_equal(whole(f"{tmp_path / 'x.zip'}::a/0"), X)

"""The picture of the house is what the imports say, and the page beside it names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house import between, drawn, floors, imports, levels

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FLOORS = {"__main__", "doctor", "layers", "jobs", "torch_backend", "segments", "testing", "geometry"}
FLOORS |= {"trace", "errors"}


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_picture_is_what_the_imports_say():
    assert (ROOT / "docs" / "images" / "architecture.svg").read_text() == drawn(), "run docs/house.py"


def test_every_module_is_in_the_picture_once():
    graph = imports()
    plan = floors(graph)
    assert plan.keys() == FLOORS
    shown = [
        ".".join(filter(None, (floor, room.name * (room.name != floor), file)))
        for floor, rows in plan.items()
        for row in rows
        for room in row
        for file in room.files or ("",)
    ]
    packages = {name for name in graph if any(other.startswith(f"{name}.") for other in graph)}
    assert sorted(shown) == sorted(graph.keys() - packages)


def test_what_is_above_imports_from_below():
    graph = imports()
    height = levels(between(graph))
    for floor, below in between(graph).items():
        assert all(height[floor] > height[other] for other in below)


def test_a_circle_is_found():
    with pytest.raises(ValueError, match=r"a circle of imports among \['a', 'b'\]"):
        levels({"a": {"b"}, "b": {"a"}, "c": set()})


def test_imports_for_type_checkers_count_as_well(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "low.py").write_text("if TYPE_CHECKING:\n    from house.high import High\n")
    (package / "high.py").write_text("from house import low\n")
    with pytest.raises(ValueError, match="a circle"):
        levels(between(imports(package)))


def test_files_that_the_page_names_are_there():
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text())
    assert named
    for name in named:
        assert (ROOT / "distdl_rma" / name).exists() or (ROOT / name).exists(), name

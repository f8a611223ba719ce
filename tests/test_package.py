"""What others install: the wheel, the source distribution, and the version that all places name."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import distdl_rma

ROOT = Path(__file__).parents[1]
NAME = f"distdl_rma-{distdl_rma.__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a wheel and a source distribution of this tree."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def in_tree(*under: str) -> set[str]:
    """Files of the tree that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *under]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this tree is no git checkout")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_source_distribution_is_the_tree(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert names - {"PKG-INFO"} == in_tree()


def test_the_wheel_is_the_package_and_its_metadata(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as archive:
        names, info = set(archive.namelist()), f"{NAME}.dist-info"
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    beside = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert names == in_tree("distdl_rma") | {f"{info}/{name}" for name in beside}
    assert "distdl_rma/py.typed" in names
    assert licence == (ROOT / "LICENSE").read_text()
    assert (metadata["Name"], metadata["Version"]) == ("distdl_rma", distdl_rma.__version__)
    assert "rma = distdl_rma.torch_backend:register" in entry_points
    assert "distdl_rma = distdl_rma.__main__:script" in entry_points


def test_changelog_and_citation_name_the_version() -> None:
    changes = re.findall(r"^## \[(\d.*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert changes[0] == (distdl_rma.__version__, citation["date-released"])
    assert citation["version"] == distdl_rma.__version__


def test_the_citation_says_what_the_metadata_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    for said in (project["name"], project["description"], project["license"], *project["keywords"]):
        assert re.search(rf"(: |- ){re.escape(said)}$", citation, re.MULTILINE), said


def test_tests_that_the_makefile_names_are_there():
    named = set(re.findall(r"\btests(?:/\w+)+(?:\.py)?", (ROOT / "Makefile").read_text()))
    assert len(named) > 20 and not [name for name in sorted(named) if not (ROOT / name).exists()]

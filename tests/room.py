"""Check one room, a folder of distdl_rma, and what imports it: ``python -m tests.room layers/ops/conv``.

Side by side run ruff, mypy on the room and the folders that import it, the tests without MPI, and the day's
MPI tests on 2 ranks, see ``matrix.py``. The tests are those of the room, and of the folders that import it
those test files that import a module of the room. What operations do, random layers show.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import grimp

from tests import side_by_side

ROOT = Path(__file__).parents[1]
RUN = shlex.quote(sys.executable)
PACKAGE, TESTS = ROOT / "distdl_rma", ROOT / "tests"
# Of rooms whose numbers are tested through what stands on them.
ABOVE = {"layers.ops": TESTS / "layers" / "partitioned" / "test_random.py"}


def main(arguments: Sequence[str]) -> int:
    """Check a room; return the exit status, 0 when all passed."""
    parser = argparse.ArgumentParser(description="Check one room and what imports it.", allow_abbrev=False)
    parser.add_argument("room", help="a folder or a file of distdl_rma, such as layers/ops/conv or errors.py")
    try:
        room = module_of(parser.parse_args(arguments).room)
    except ValueError as error:
        parser.error(str(error))
    return side_by_side.main(commands(room))


def commands(room: str) -> dict[str, str]:
    """What checks a room, by names: lint, types, tests without MPI, MPI tests."""
    sources, tests = sources_for(room), suite_for(room)
    files = spelled([*sources, *tests])
    found = {
        "lint": f"{RUN} -m ruff check {files} && {RUN} -m ruff format --check {files}",
        "types": f"{RUN} -m mypy {spelled(sources)}",
    }
    if tests:
        # 5: all of them are MPI tests.
        found["plain tests"] = f"{RUN} -m pytest -m 'not mpi' {spelled(tests)} || [ $? = 5 ]"
    mpi = [test for test in tests if "mark.mpi" in test.read_text()]
    if mpi:
        found["MPI tests"] = f"{RUN} tests/run_mpi.py --ranks 2 --day today -- {spelled(mpi)}"
    return found


def spelled(paths: Iterable[Path]) -> str:
    """Paths below the root, as a shell reads them."""
    return shlex.join(str(path.relative_to(ROOT)) for path in paths)


def module_of(room: str) -> str:
    """Name below distdl_rma of a folder or file, ``layers.split`` of ``layers/split/``."""
    found = ".".join(Path(room.removeprefix("distdl_rma/").removesuffix(".py")).parts)
    if not found or f"distdl_rma.{found}" not in graph().modules:
        raise ValueError(f"distdl_rma has no room {room!r}; one is layers/split/functions")
    return found


@cache
def graph() -> grimp.ImportGraph:
    """Who imports whom in the package."""
    return grimp.build_graph("distdl_rma", cache_dir=None)


def importing(room: str) -> list[str]:
    """Folders that import a module of a room directly, the room itself left out; of the top floor, files."""
    inside = modules(room)
    importers = {other for one in inside for other in graph().find_modules_that_directly_import(one)}
    found = {folder_of(other) for other in importers - inside - {"distdl_rma"}}
    return sorted(one.removeprefix("distdl_rma.") for one in found)


def modules(room: str) -> set[str]:
    top = f"distdl_rma.{room}"
    return {top, *graph().find_descendants(top)}


def folder_of(module: str) -> str:
    """The folder of a module; of a file that lies beside the folders, itself."""
    folder = module if graph().find_children(module) else module.rpartition(".")[0]
    return module if folder == "distdl_rma" else folder


def sources_for(room: str) -> list[Path]:
    """The room and the folders that import it; none that lies in another one of them."""
    found = [source_of(place) for place in (room, *importing(room))]
    return [one for one in found if not any(other in one.parents for other in found)]


def source_of(place: str) -> Path:
    path = PACKAGE.joinpath(*place.split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def suite_for(room: str) -> list[Path]:
    """Test files of a room, and those of the folders that import it that import a module of the room."""
    beside = [test for place in importing(room) for test in suite_of(place)]
    named = [test for test in beside if imports(test.read_text(), room)]
    above = [test for place, test in ABOVE.items() if f"{room}.".startswith(f"{place}.")]
    return [*dict.fromkeys([*suite_of(room), *named, *above])]


def suite_of(place: str) -> list[Path]:
    """Test files of a folder or file: ``test_<file>.py``, or a folder of its name."""
    path = TESTS.joinpath(*place.split("."))
    file = path.with_name(f"test_{path.name}.py")
    return [*([file] if file.exists() else []), *sorted(path.rglob("test_*.py"))]


def imports(text: str, room: str) -> bool:
    """Whether a program names a module of a room in its imports."""
    parent, _, leaf = f"distdl_rma.{room}".rpartition(".")
    inside = rf"^ *(from|import) {re.escape(parent)}\.{leaf}\b"
    itself = rf"^ *from {re.escape(parent)} import .*\b{leaf}\b"
    return bool(re.search(f"{inside}|{itself}", text, re.MULTILINE))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

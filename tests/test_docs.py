"""The documentation keeps its word: its Python runs, and what it names and links to exists.

The convention for README.md and docs/**/*.md: the ```python blocks of a page are one program. They run in the
order of the page, in one namespace, on two ranks and under a time limit. So a block may use what stood in an
earlier one, and the page says so. What is to be shown only has another language, or none, or is indented.
All pages run in one job, one after the other; after one that fails, the others run in another.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.run_mpi import launched, mpiexec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_PAGES = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
RANKS = 2
SECONDS = 240
# Every page in a folder and a namespace of its own; when all ranks have come to its end, that is noted.
RUN_PAGES = """
import os, sys
from pathlib import Path
from mpi4py import MPI
for folder in map(Path, sys.argv[1:]):
    os.chdir(folder)
    script = next(folder.parent.glob(f"{folder.name}.py"))
    names = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(script.read_text(), script, "exec"), names)
    if "P_world" in names:
        # Else the next page would get the same machine.
        names["P_world"].deactivate()
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        folder.with_suffix(".over").touch()
"""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines(page: Path) -> Iterator[tuple[str | None, str]]:
    """Lines of a page with the language of the fenced block that they are in, None outside of one."""
    language = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```").strip() or "text" if language is None else None
            yield None, ""
        else:
            yield language, line


def program(page: Path) -> str:
    """All Python of a page; each line keeps its number, so that a traceback points into the page."""
    return "\n".join(line if language == "python" else "" for language, line in lines(page)) + "\n"


def prose(page: Path) -> str:
    return "\n".join(line for language, line in lines(page) if language is None)


def commands(page: Path) -> str:
    """What a page shows as something to type: shell blocks, and code within a line."""
    shell = [line for language, line in lines(page) if language == "sh"]
    return "\n".join([*shell, *re.findall(r"`([^`]+)`", prose(page))])


def anchors(page: Path) -> set[str]:
    """Names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run_pages(folder: Path, pages: Sequence[Path]) -> dict[Path, str]:
    """What went wrong on each of the pages, up to the first one that did not come to its end."""
    folders = []
    for number, page in enumerate(pages):
        folders.append(folder / f"{number}_{page.stem}")
        folders[-1].mkdir()
        folders[-1].with_suffix(".py").write_text(program(page))
    command = [*mpiexec(RANKS), sys.executable, "-m", "mpi4py", "-c", RUN_PAGES, *map(str, folders)]
    over, deadline = 0, time.monotonic() + SECONDS
    with (folder / "output").open("wb") as output, launched(command, output, output) as job:
        while job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            if over < len(pages) and folders[over].with_suffix(".over").exists():
                over, deadline = over + 1, time.monotonic() + SECONDS
        status = job.poll()
    over = sum(each.with_suffix(".over").exists() for each in folders)
    left = (", ".join(file.name for file in each.iterdir()) for each in folders)
    problems = {page: files and f"leaves {files} behind" for page, files in zip(pages, left, strict=True)}
    if status == 0:
        return problems
    failed = min(over, len(pages) - 1)
    ended = f"not over after {SECONDS} s" if status is None else f"exit status {status}"
    problems[pages[failed]] = f"{ended}; lines are those of the page\n{(folder / 'output').read_text()}"
    return {page: problems[page] for page in pages[: failed + 1]}


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """What went wrong on each page whose test was chosen, an empty text where nothing did."""
    if shutil.which(mpiexec(1)[0]) is None:
        pytest.skip("there is no mpiexec")
    users = [item for item in request.session.items if "problems" in item.fixturenames]
    left, found = [item.callspec.params["page"] for item in users], {}
    while left:
        found |= run_pages(tmp_path_factory.mktemp("pages"), left)
        left = [page for page in left if page not in found]
    return found


# Twenty seconds, whatever the share: one job runs all pages.
# The first of them waits for all pages.
@pytest.mark.slow
@pytest.mark.timeout(5 * SECONDS)
@pytest.mark.parametrize("page", [page for page in PAGES if program(page).strip()], ids=name)
def test_the_python_of_a_page_runs_on_two_ranks(page: Path, problems: dict[Path, str]) -> None:
    if problems[page]:
        pytest.fail(f"{name(page)}: {problems[page]}", pytrace=False)


def test_the_first_script_of_the_readme_is_complete_and_changes_three_lines() -> None:
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first, "README.md shows no Python"
    compile(first[1], "README.md", "exec")
    for needed in ("distribute(model, ", "loss.backward()", "optimizer.step()"):
        assert needed in first[1]
    assert first[1].count("  # was ") == 3


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_make_targets_and_variables_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = {
        *re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE),
        *re.findall(r"\$\(([A-Z]+)\)", makefile),
    }
    for call in re.findall(r"\bmake((?: [\w=.-]+)+)", commands(page)):
        for word in call.split():
            variable, assigned, _ = word.partition("=")
            known = variables if assigned else targets
            assert variable in known, f"make{call}: the Makefile has no {variable}"


def test_what_the_makefile_runs_can_be_run() -> None:
    for script in re.findall(r"/python ([\w/]+\.py)", (ROOT / "Makefile").read_text()):
        assert '__name__ == "__main__"' in (ROOT / script).read_text(), f"{script} runs nothing by itself"


def test_the_readme_names_the_two_commands() -> None:
    assert {"make demo", "make test"} <= set(commands(ROOT / "README.md").splitlines())


def test_documented_environment_variables_are_those_of_the_source() -> None:
    pattern = re.compile(r"\bDISTDL_RMA_[A-Z_]+\b")

    def named(files: Iterable[Path]) -> set[str]:
        return {found for file in files for found in pattern.findall(file.read_text())}

    source = named((ROOT / "distdl_rma").rglob("*.py"))
    # The page about clusters has all of them.
    assert named(ALL_PAGES) == named([ROOT / "docs" / "clusters.md"]) == source


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{name(page)} links to {broken}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", tests, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", prose(page)))
    assert named <= defined, f"{name(page)} names tests that do not exist: {sorted(named - defined)}"


def test_every_line_of_what_is_ordered_names_its_test() -> None:
    ordered = (ROOT / "docs" / "one-sided.md").read_text().partition("| guaranteed | test |")[2]
    rows = ordered.partition("\n\n")[0].splitlines()[2:]
    assert rows
    assert all(re.search(r"\| `test_\w+` \|$", row) for row in rows)


def test_every_page_is_linked_from_the_readme() -> None:
    linked = re.findall(r"\]\((docs/[\w/-]+\.md)", prose(ROOT / "README.md"))
    assert {name(page) for page in PAGES[1:]} == set(linked)

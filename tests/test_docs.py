"""The documentation keeps its word: its Python runs, and what it names and links to exists.

The convention for README.md and docs/**/*.md: the ```python blocks of a page are one program. They run in the
order of the page, in one namespace, on two ranks and under a time limit. So a block may use what stood in an
earlier one, and the page says so. What is to be shown only has another language, or none, or is indented.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run_mpi import launched, mpiexec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
RANKS = 2
SECONDS = 120


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


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("page", [page for page in PAGES if program(page).strip()], ids=name)
def test_the_python_of_a_page_runs_on_two_ranks(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(mpiexec(1)[0]) is None:
        pytest.skip("there is no mpiexec")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text(program(page))
    with launched([*mpiexec(RANKS), sys.executable, "-m", "mpi4py", str(script)]) as job:
        try:
            status = job.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name(page)} is not over after {SECONDS} s", pytrace=False)
    assert status == 0, f"{name(page)}: exit status {status}; lines of the traceback are those of the page"
    assert list(tmp_path.iterdir()) == [script], "the page leaves files behind"


def test_the_first_script_of_the_readme_is_complete() -> None:
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first, "README.md shows no Python"
    compile(first[1], "README.md", "exec")
    for needed in ("GradientSync(model, P_world)", "loss.backward()", "optimizer.step()"):
        assert needed in first[1]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_make_targets_and_variables_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)) | set(
        re.findall(r"\$\(([A-Z]+)\)", makefile)
    )
    for call in re.findall(r"\bmake((?: [\w=.-]+)+)", commands(page)):
        for word in call.split():
            variable, assigned, _ = word.partition("=")
            known = variables if assigned else targets
            assert variable in known, f"make{call}: the Makefile has no {variable}"


def test_the_readme_names_the_two_commands() -> None:
    assert {"make demo", "make test"} <= set(commands(ROOT / "README.md").splitlines())


def test_documented_environment_variables_are_those_of_the_source() -> None:
    pattern = re.compile(r"\bDISTDL_RMA_[A-Z_]+\b")
    source = {
        found for file in (ROOT / "distdl_rma").rglob("*.py") for found in pattern.findall(file.read_text())
    }
    documented = {found for page in ALL_PAGES for found in pattern.findall(page.read_text())}
    assert documented == source
    assert set(pattern.findall((ROOT / "README.md").read_text())) == source, (
        "the table of the README has all of them"
    )


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

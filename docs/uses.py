"""Where a public name is used: examples that import it, and sections of guides whose code has it.

The reference shows both below the docstring of the name. Nothing here is a list: examples are read as Python,
guides are the pages that README.md links to as such.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import front

__all__ = ["shown", "used"]

ROOT = Path(__file__).parents[1]
GUIDES = "Start here", "Guides", "Understand"
SHOWN = 6


@cache
def used() -> tuple[dict[str, list[Path]], dict[str, list[tuple[str, str]]]]:
    """By name: examples that import it; titles and addresses of sections that have it, best first."""
    examples: dict[str, list[Path]] = {}
    for path in sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]):
        for name in _imported(_code(path)):
            examples.setdefault(name, []).append(path.relative_to(ROOT))
    found: dict[str, list[tuple[int, str, str]]] = {}
    groups = front.groups((ROOT / "README.md").read_text())
    linked = [page for group in GUIDES for page in re.findall(r"\]\((docs/[\w/-]+\.md)\)", groups[group])]
    for page in dict.fromkeys(linked):
        for name, section in _sections(ROOT / page).items():
            found.setdefault(name, []).append(section)
    guides = {
        name: [(title, address) for _, title, address in sorted(sections, key=lambda one: -one[0])]
        for name, sections in found.items()
    }
    return examples, guides


def shown(name: str) -> list[str]:
    """Lines of reStructuredText for the docstring of a name; none where it is used nowhere."""
    examples, guides = used()
    links = [f"`{title} <{address}>`__" for title, address in guides.get(name, [])[:SHOWN]]
    files = [f":download:`{path.name} </{path}>`" for path in examples.get(name, [])]
    lines = [f"* {', '.join(row)}" for row in (links, files) if row]
    return ["", ".. rubric:: Used in", "", *lines, ""] if lines else []


def _code(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(lines) for lines in cells)


def _imported(code: str) -> list[str]:
    return [
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "distdl_rma"
        for alias in node.names
    ]


def _sections(page: Path) -> dict[str, tuple[int, str, str]]:
    # By name: how often the code of the page has it, and the section that has it most often.
    parts = re.split(r"^#+ (.*)$", _without_headings_in_code(page.read_text()), flags=re.MULTILINE)
    counts: dict[str, Counter[int]] = {}
    for at, text in enumerate(parts[2::2]):
        fences = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for word in re.findall(r"\w+", " ".join([*fences, *re.findall(r"`([^`\n]+)`", text)])):
            counts.setdefault(word, Counter())[at] += 1
    titles = [re.sub(r"[`*\\<>]|\]\(.*?\)|\[", "", title) for title in parts[1::2]]
    address = f"../{page.relative_to(ROOT / 'docs').with_suffix('.html')}"
    found = {}
    for word, sections in counts.items():
        at = sections.most_common(1)[0][0]
        title = titles[0] if at == 0 else f"{titles[0]}: {titles[at]}"
        found[word] = sections.total(), title, f"{address}#{_identifier(titles[at])}" if at else address
    return found


def _identifier(title: str) -> str:
    # Of a heading in HTML, as docutils makes it.
    return re.sub(r"^[-\d]+|-+$", "", re.sub(r"[^a-z0-9]+", "-", title.lower()))


def _without_headings_in_code(text: str) -> str:
    # A comment of a program is no heading.
    return re.sub(r"^```.*?^```", lambda code: re.sub(r"(?m)^#", " #", code[0]), text, flags=re.M | re.S)

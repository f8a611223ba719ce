"""The front page of the site: README.md in another order, so that its first screen says what a newcomer asks.

``index.md`` in the folder of the project is a template, where a name in double braces stands for a part::

    what     the first paragraph
    gains    the section about gains; without one, the paragraphs of the head that link to the benchmarks
    install  the command that installs the package
    changed  the lines of the first script that differ from those of one process
    pages    the groups of links to pages, and the reference
    script   the heading of the section with that script, as links have it
    version  what these pages document
    more     what is left, pictures included
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["filled", "groups"]


def groups(readme: str) -> dict[str, str]:
    """Lists of README.md below a line that is their title: ``Start here:``."""
    found = re.findall(r"^([A-Z][a-z ]+):\n\n(- .*?)\n(?=\n|\Z)", f"{readme}\n", re.MULTILINE | re.DOTALL)
    return {title: links for title, links in found if "](" in links}


def filled(template: str, readme: str, reference: Mapping[str, str], version: str) -> str:
    """The front page; ``reference`` are the modules of the reference and their pages."""
    head, *rest = re.split(r"^(?=## )", readme, flags=re.MULTILINE)
    what, *left = [part for part in head.strip().split("\n\n") if not part.startswith("# ")]
    sections = [
        section.strip().split("\n\n") for section in rest if not section.startswith("## Documentation")
    ]
    if found := [section for section in sections if "gain" in section[0]]:
        sections.remove(found[0])
        gains = [part for part in found[0] if not _is_picture(part)]
        left += [part for part in found[0] if _is_picture(part)]
    else:
        gains = [part for part in left if "(docs/benchmarks.md" in part]
        left = [part for part in left if part not in gains]
    script = next(section[0].removeprefix("## ") for section in sections if "```python" in "".join(section))
    changed = "\n".join(re.findall(r"^.*  # was .*$", readme, re.MULTILINE))
    shown = groups(readme)
    names = ", ".join(f"[`{name}`]({page}.rst)" for name, page in reference.items())
    shown["Reference"] = re.sub(
        r"- All public names: .*", f"- All public names: {names}.", shown["Reference"]
    )
    parts = {
        "what": what,
        "gains": "\n\n".join(gains),
        "install": next(iter(re.findall(r"^pip install .*?(?=  #|$)", readme, re.MULTILINE)), ""),
        "changed": f"```python\n{changed}\n```",
        "script": re.sub(r"[^\w-]", "", script.lower().replace(" ", "-")),
        "pages": "\n\n".join(_card(title, links) for title, links in shown.items()),
        "version": version,
        "more": "\n\n".join(
            ["## In more detail", *left, *(part for section in sections for part in section)]
        ),
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda name: parts[name[1]], template)


def _is_picture(part: str) -> bool:
    # Or what is written below one.
    return part.startswith(("![", "*")) and not part.startswith("**")


def _card(title: str, links: str) -> str:
    return f":::{{container}} card\n\n**{title}**\n\n{links}\n\n:::"

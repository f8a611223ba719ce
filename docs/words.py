"""What the search finds beside the words of a page: words that users type, and functions of torch.

A comment below a heading, which no page shows, has words that lead there::

    ## After a kill

    <!-- search: resume, restart -->

They are entries of the index of the site. An entry that is all of a query comes before titles and text. The
names of functions on docs/split-functions.md are objects, as the names of the reference are: ``cumsum`` and
``torch.cumsum`` lead to the place where the page has it.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType
from sphinx.transforms import SphinxTransform

import functions

__all__ = ["setup"]

# Pages that name everything, and explain nothing: the search knows their headings only.
QUIET = "CHANGELOG", "docs/benchmarks"
COMMENT = re.compile(r"<!-- search: (.*) -->\s*", re.DOTALL)


class Words(SphinxTransform):
    """Make entries of the index of comments with words."""

    # Before Sphinx collects the entries.
    default_priority = 600

    def apply(self, **_options: Any) -> None:
        """Put the entries where the comment was; they lead to the heading above it."""
        for raw in list(self.document.findall(nodes.raw)):
            if found := COMMENT.fullmatch(raw.astext()):
                entries = [
                    ("single", " ".join(word.split()), raw.parent["ids"][0], "main", None)
                    for word in found[1].split(",")
                ]
                raw.replace_self(addnodes.index(entries=entries))
        if self.env.docname in QUIET:
            for section in self.document.findall(nodes.section):
                for part in section.children:
                    if isinstance(part, (nodes.paragraph, nodes.bullet_list, nodes.table)):
                        part["classes"].append("no-search")


class Functions(Domain):
    """The functions of torch on docs/split-functions.md, by their names in torch."""

    name = "function"
    label = "function"
    # A query may name any module that has the function: it is a word of what the search shows of a name.
    object_types: ClassVar[dict[str, ObjType]] = {
        "torch": ObjType("of torch, of torch.nn.functional, or method of torch.Tensor")
    }
    initial_data: ClassVar[dict[str, Any]] = {"objects": {}}

    def clear_doc(self, docname: str) -> None:
        """Forget the names of a page."""
        objects = self.data["objects"]
        self.data["objects"] = {name: at for name, at in objects.items() if at[0] != docname}

    def process_doc(self, _env: Any, docname: str, document: nodes.document) -> None:
        """Give each name of the page a place to lead to."""
        if docname != functions.DOCNAME:
            return
        for literal in document.findall(nodes.literal):
            if (name := _name(literal)) and name not in self.data["objects"]:
                literal["ids"] = [name]
                self.data["objects"][name] = docname, name

    def get_objects(self) -> Any:
        """Names, with the page and the place of each."""
        for name, (docname, anchor) in self.data["objects"].items():
            yield name, name, "torch", docname, anchor, 0


def _name(literal: nodes.literal) -> str | None:
    # In torch, of a name after the bold words of a row: `sum`; `linalg`: `cond`, `det`; `_foreach_`: `add`.
    row = literal.parent
    if not isinstance(row.parent, nodes.list_item) or row.next_node(nodes.strong) is None:
        return None
    home, parts = "", [part for part in row if part.astext()]
    for part, behind in zip(parts, [*parts[1:], nodes.Text("")], strict=True):
        if isinstance(part, nodes.literal) and behind.astext().startswith(":"):
            home = part.astext()
        elif part is literal:
            return f"torch.{home}{'' if home.endswith('_') or not home else '.'}{part.astext()}"
    return None


def setup(app: Sphinx) -> None:
    """Have Sphinx use what is here."""
    app.add_transform(Words)
    app.add_domain(Functions)

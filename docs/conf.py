"""How ``make docs`` builds its pages: README.md, the pages of docs/, and the reference of all public names.

The source folder is that of the project, so that links between its pages hold. The reference is written from
the docstrings. ``docs/publish.py`` calls Sphinx, and ``docs/verify.py`` looks at what it has written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).parent))

import front
import publish
import uses
import verify
import words

# Modules whose names users import.
BELOW = "layers", "segments", "geometry", "trace", "testing"
PUBLIC = ["distdl_rma", *(f"distdl_rma.{name}" for name in BELOW)]
REFERENCE = {name: f"docs/reference/{name.rpartition('.')[2]}" for name in PUBLIC}
ROOT = Path(__file__).parents[1]

project = "distdl_rma"
author = "The distdl_rma authors"
project_copyright = "2026, The distdl_rma authors"
version, release = publish.version()

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
root_doc = "index"
include_patterns = ["*.md", "docs/**"]
# Its parts are on the front page.
exclude_patterns = ["README.md"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
numpydoc_show_class_members = False
# Roles in docstrings lead somewhere; types of signatures may be internal, or of other packages.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj)", ".*")]
autodoc_type_aliases = {"DTypeLike": "DTypeLike"}
autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 90
html_theme = "furo"
html_title = f"distdl_rma {version}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("versions.js", {"defer": "defer"})]
templates_path = ["templates"]
SIDEBAR = "brand", "search", "scroll-start", "navigation", "scroll-end"
html_sidebars = {"**": [*(f"sidebar/{part}.html" for part in SIDEBAR), "versions.html"]}


def add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Give the front page the parts of README.md, and pages with others below them a table of contents."""
    contents: dict[str, list[str]] = {}
    if page == root_doc:
        readme = (ROOT / "README.md").read_text()
        source[0] = front.filled(source[0], readme, REFERENCE, release)
        for title, links in front.groups(readme).items():
            contents[title] = re.findall(r"\]\(((?!docs/layers/)[\w/-]+)\.md\)", links)
        contents["Reference"] = [*REFERENCE.values(), *contents["Reference"]]
    if page == "docs/layers":
        contents[""] = re.findall(r"\]\((layers/[\w-]+)\.md\)", source[0])
    for title, pages in contents.items():
        lines = [f":caption: {title}"] * bool(title) + [":hidden:", ":maxdepth: 1", "", *dict.fromkeys(pages)]
        source[0] += "\n".join(["\n```{toctree}", *lines, "```\n"])


def add_links(
    _app: Sphinx, kind: str, name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names, have its roles find any module, and add its uses."""
    for at, line in enumerate(lines):
        roles = re.sub(r":(class|meth|func):`(?=\w)", r":\1:`.", line)
        lines[at] = re.sub(r"``(docs/[\w/-]+)\.md``", r":doc:`\1.md </\1>`", roles)
    if kind in {"class", "exception", "function"}:
        lines += uses.shown(name.rpartition(".")[2])


def name_classes(
    _app: Sphinx,
    _kind: str,
    _name: str,
    _object: object,
    _options: object,
    signature: str | None,
    returned: str,
) -> tuple[str | None, str]:
    """Have defaults that are classes read as Python does: ``numpy.float32``."""
    return signature and re.sub(r"<class '([\w.]+)'>", r"\1", signature), returned


def example_pages(_app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """Show each example as a page."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = PygmentsBridge("html").highlight_block(path.read_text(), "python")
        name = f"examples/{path.name}"
        yield name, {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


class Pages(HTML5Translator):
    """Pages with links to pages of examples, and whose pictures lead to themselves.

    A phone shows pictures too small to be read.
    """

    def visit_download_reference(self, node: nodes.Element) -> None:
        """Have an example lead to its page rather than to a file."""
        page = self.builder.current_docname
        name, _ = self.builder.env.relfn2path(node["reftarget"], page)
        if re.fullmatch(r"examples/\w+\.py", name):
            target = self.builder.get_relative_uri(page, name)
            self.body.append(self.starttag(node, "a", "", CLASS="reference internal", href=target))
            self.context.append("</a>")
        else:
            super().visit_download_reference(node)

    def visit_image(self, node: nodes.Element) -> None:
        """Open the link around a picture."""
        name = self.builder.images[node["uri"]]
        classes = "picture small" if verify.has_small_text(ROOT / node["uri"]) else "picture"
        self.body.append(f'<a class="{classes}" href="{self.builder.imgpath}/{name}">')
        super().visit_image(node)
        self.body.append("</a>")


def setup(app: Sphinx) -> None:
    """What Sphinx calls when it has read this file."""
    words.setup(app)
    app.set_translator("html", Pages)
    app.connect("html-collect-pages", example_pages)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", name_classes)
    app.connect("autodoc-process-docstring", add_links)

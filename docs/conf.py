"""How ``make docs`` builds its pages: README.md, the pages of docs/, and the reference of all public names.

The source folder is that of the project, so that links between its pages hold. The reference is written from
the docstrings.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import distdl_rma

# Modules whose names users import.
BELOW = "layers", "segments", "geometry", "trace", "testing"
PUBLIC = ["distdl_rma", *(f"distdl_rma.{name}" for name in BELOW)]

project = "distdl_rma"
author = "The distdl_rma authors"
project_copyright = "2026, The distdl_rma authors"
version = release = distdl_rma.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
myst_heading_anchors = 4
numpydoc_show_class_members = False
# Roles in docstrings lead somewhere; types of signatures may be internal, or of other packages.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj)", ".*")]
autodoc_type_aliases = {"DTypeLike": "DTypeLike"}
autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 90
html_theme = "furo"
html_title = f"distdl_rma {release}"
html_copy_source = False


def add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Give the front page a table of contents: the reference, and the groups of links of README.md."""
    if page != root_doc:
        return
    groups = re.findall(r"^([A-Z][a-z ]+):\n\n(- .*?)\n\n", f"{source[0]}\n\n", re.MULTILINE | re.DOTALL)
    contents = {title: re.findall(r"\]\(([\w/-]+)\.md\)", links) for title, links in groups}
    contents["Reference"] = [f"docs/reference/{name.rpartition('.')[2]}" for name in PUBLIC]
    for title, pages in contents.items():
        lines = [f":caption: {title}", ":hidden:", ":maxdepth: 1", "", *dict.fromkeys(pages)]
        source[0] += "\n".join(["\n```{toctree}", *lines, "```\n"])


def add_links(
    _app: Sphinx, _kind: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names, and have its roles find names of any module."""
    for at, line in enumerate(lines):
        roles = re.sub(r":(class|meth|func):`(?=\w)", r":\1:`.", line)
        lines[at] = re.sub(r"``(docs/[\w/-]+)\.md``", r":doc:`\1.md </\1>`", roles)


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


def setup(app: Sphinx) -> None:
    """What Sphinx calls when it has read this file."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", name_classes)
    app.connect("autodoc-process-docstring", add_links)

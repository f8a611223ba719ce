"""What ``make docs`` runs: the site of this version, beside those of others, in a folder for any web server.

``python docs/publish.py docs-output`` writes::

    index.html       leads to latest
    versions.html    all versions, as a page
    versions.json    all versions, for the list in the sidebar
    latest/          leads to the newest release, or to dev where there is none; has every page of it
    dev/, 0.1.0/     a folder for each version

Folders of other versions stay: to publish several of them, run it from a checkout of each, into one folder.
Links between versions are relative, so that the folder may lie anywhere.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import distdl_rma

__all__ = ["index", "main", "version"]

ROOT = Path(__file__).parents[1]
DEV = "dev"
# The page and the place in it stay; without scripts the front page of the version is shown.
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>distdl_rma</title>
<link rel="canonical" href="{target}">
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<script>location.replace("{target}" + location.search + location.hash)</script>
<p><a href="{target}">distdl_rma: documentation</a></p>
</html>
"""
VERSIONS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>Versions of distdl_rma</title>
<body style="font: 1rem/1.6 sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem">
<h1>Versions of distdl_rma</h1>
<ul>
{items}
</ul>
</body>
</html>
"""


def version(changelog: str | None = None) -> tuple[str, str]:
    """Name of the version that this checkout documents, which is its folder, and what a reader is told.

    Where CHANGELOG.md has changes after the last release, they are those of the development version.
    """
    text = (ROOT / "CHANGELOG.md").read_text() if changelog is None else changelog
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if unreleased and "\n- " in unreleased[1]:
        return DEV, f"the development version: {distdl_rma.__version__} and what has changed since"
    return distdl_rma.__version__, f"version {distdl_rma.__version__}"


def index(site: Path) -> None:
    """Write what lies beside the folders of versions."""
    names = sorted((page.parent.name for page in site.glob("*/objects.inv")), key=_age, reverse=True)
    releases = [name for name in names if name != DEV]
    latest = (releases or names)[0]
    (site / "versions.json").write_text(json.dumps({"latest": latest, "versions": names}) + "\n")
    items = [
        f'<li><a href="{name}/index.html">{escape(name)}</a>{", latest" * (name == latest)}</li>'
        for name in names
    ]
    (site / "versions.html").write_text(VERSIONS.format(items="\n".join(items)))
    (site / "index.html").write_text(REDIRECT.format(target=f"{latest}/index.html"))
    shutil.rmtree(site / "latest", ignore_errors=True)
    for page in (site / latest).rglob("*.html"):
        path = page.relative_to(site / latest)
        there = site / "latest" / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(REDIRECT.format(target=f"{'../' * len(path.parts)}{latest}/{path.as_posix()}"))


def _age(name: str) -> tuple[bool, list[int]]:
    # Numbers as numbers; the development version is the newest.
    return name == DEV, [int(number) for number in re.findall(r"\d+", name)]


def main(folder: str) -> int:
    """Build this version, look at what was built, and write what lies beside it. Returns the exit status."""
    # Here, since only this needs Sphinx.
    from sphinx.cmd.build import build_main

    import verify

    site = Path(folder)
    built = site / version()[0]
    shutil.rmtree(built, ignore_errors=True)
    # A fresh environment: pages that are kept would keep their warnings to themselves.
    with TemporaryDirectory() as trees:
        options = f"--conf-dir docs --fresh-env --fail-on-warning --quiet --doctree-dir {trees}"
        status = build_main([*options.split(), str(ROOT), str(built)])
    if status:
        return status
    index(site)
    return verify.main(folder, built.name)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

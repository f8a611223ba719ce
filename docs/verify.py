"""What ``make docs`` looks at when Sphinx is done: the pages as they are, and what their search finds.

Sphinx checks references. It does not see links that were written as HTML, links to headings of pages that it
has not made, or what a phone does with a wide table. ``python docs/verify.py docs-output dev`` looks again at
a version without building it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["Page", "has_small_text", "hits", "problems"]

# What users type, and the page that they need.
SEARCHES = {
    "resume": "docs/checkpoints",
    "checkpoint": "docs/checkpoints",
    "resume training": "docs/checkpoints",
    "save checkpoint": "docs/checkpoints",
    "validation": "docs/recipe",
    "pretrained": "docs/recipe",
    "lightning": "docs/recipe",
    "mixed precision": "docs/recipe",
    "autocast": "docs/recipe",
    "gradient accumulation": "docs/recipe",
    "out of memory": "docs/larger-than-memory",
    "inference": "docs/larger-than-memory",
    "hang": "docs/failures",
    "deadlock": "docs/failures",
    "timeout": "docs/failures",
    "slurm": "docs/clusters",
    "docker": "docs/clusters",
    "install": "docs/clusters",
    "multi-node": "docs/clusters",
    "nifti": "docs/data",
    "zarr": "docs/data",
    "hdf5": "docs/data",
    "dataloader": "docs/data",
    "augmentation": "docs/data",
    "gpu": "docs/devices",
    "cuda": "docs/devices",
    "transformers": "docs/models",
    "custom loss": "docs/gradients",
    "torch.compile": "docs/sharp-bits",
    "fsdp": "docs/torch-distributed",
    "ddp": "docs/torch-distributed",
    "notebook": "docs/virtual-ranks",
    "debug": "docs/virtual-ranks",
    "torch.cumsum": "docs/split-functions#torch.cumsum",
    "cumsum": "docs/split-functions#torch.cumsum",
    "torch.nn.functional.avg_pool2d": "docs/split-functions#torch.avg_pool2d",
    "torch.linalg.svd": "docs/split-functions#torch.linalg.svd",
    "distribute": "docs/reference/distdl_rma#distdl_rma.distribute",
}
# One click from the front page.
NEAR = "docs/recipe.html", "docs/larger-than-memory.html"
# The columns of the index and of search results are not content.
MADE = "genindex.html", "search.html", "py-modindex.html"


@dataclass
class Page(HTMLParser):
    """The facts of one page."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    title: str = ""
    problems: list[str] = field(default_factory=list)
    _open: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the page."""
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what begins."""
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        self.links += [found[name] for name in ("href", "src") if name in found]
        if tag == "img" and not found.get("alt"):
            self.problems.append(f"{found.get('src')} has no text for those who do not see it")
        within = [classes for _, classes in self._open]
        if tag == "img" and not any("picture" in classes for classes in within):
            self.problems.append(f"{found.get('src')} is not in a link to its full size")
        if tag == "table" and not any("table-wrapper" in classes for classes in within):
            self.problems.append("a table is not in a box that scrolls")
        self._open.append((tag, found.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what begins and ends."""
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Note what ends, and with it what has no end of its own, such as an image."""
        if tag in dict(self._open):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Note the title."""
        if self._open and self._open[-1][0] == "title" and "head" in dict(self._open):
            self.title += data


def problems(site: Path, built: Path) -> list[str]:
    """What is wrong with the version in ``built`` of a site, a line each."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(built.rglob("*.html"))}
    around = {path.resolve(): Page(path.read_text()) for path in site.glob("*.html")}
    found = []
    for path, page in {**pages, **around}.items():
        name = path.relative_to(site.resolve())
        dead = [link for link in dict.fromkeys(page.links) if not _leads(path, link, {**pages, **around})]
        wrong = [] if path.name in MADE else list(dict.fromkeys(page.problems))
        found += [f"{name}: {problem}" for problem in [*(f"dead link {link}" for link in dead), *wrong]]
    for title, count in Counter(page.title for page in pages.values()).items():
        if count > 1:
            found.append(f"{count} pages have the title {title!r}")
    front = pages[(built / "index.html").resolve()].links
    found += [f"{page} is not linked from the front page" for page in NEAR if page not in front]
    return found + _lost(json.loads((built / "searchindex.js").read_text()[len("Search.setIndex(") : -1]))


def has_small_text(picture: Path) -> bool:
    """Whether texts of a picture may have less than 9 pixels in the column of a page."""
    if picture.suffix != ".svg":
        return True
    drawing = picture.read_text()
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', drawing)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: [^;\"]*?([\d.]+)px", drawing)]
    return width is not None and min(sizes, default=9) * 736 / float(width[1]) < 9


def _leads(path: Path, link: str, pages: Mapping[Path, Page]) -> bool:
    # Whether a link of a page leads somewhere on this site; other sites are not asked.
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids


def _lost(index: Mapping[str, Any]) -> list[str]:
    # Searches whose first hit is another page than users need.
    lost = []
    for query, wanted in SEARCHES.items():
        first = next(hits(index, query), "nothing")
        if first.removesuffix("#") != wanted and first.partition("#")[0] != wanted:
            lost.append(f"the search for {query!r} finds {first} first, not {wanted}")
    titles = Counter(index["titles"])
    return lost + [
        f"{count} pages have the heading {title!r}" for title, count in titles.items() if count > 1
    ]


def hits(index: Mapping[str, Any], query: str) -> Iterator[str]:
    """Pages, with the place on them, that the search of the site shows for a query, from the top.

    What ``searchtools.js`` of Sphinx does, with its scores: titles, then entries of the index, names, words.
    """
    lower = query.lower().strip()
    titles, names = index["titles"], index["docnames"]
    found: list[tuple[float, str, str]] = []
    for title, places in index["alltitles"].items():
        if lower in title.lower() and len(lower) >= len(title) / 2:
            for page, anchor in places:
                score = int(15 * len(lower) / len(title) + 0.5) + (titles[page] == title)
                shown = title if titles[page] == title else f"{titles[page]} > {title}"
                found.append((score, shown, f"{names[page]}#{anchor or ''}"))
    for entry, places in index["indexentries"].items():
        if lower in entry and len(lower) >= len(entry) / 2:
            # Entries that are not main ones are shown below everything else.
            for page, anchor, main in places:
                score = int(100 * len(lower) / len(entry) + 0.5) - (0 if main else 1000)
                found.append((score, titles[page], f"{names[page]}#{anchor}"))
    found += [*_objects(index, set(re.findall(r"\w+", lower))), *_words(index, lower)]
    yield from (place for *_, place in sorted(found, key=lambda hit: (-hit[0], hit[1].lower())))


def _objects(index: Mapping[str, Any], terms: set[str]) -> Iterator[tuple[float, str, str]]:
    # Names that contain a term, where the others are in the name, its kind or the title of its page.
    for prefix, objects in index["objects"].items():
        for page, kind, priority, anchor, last in objects:
            name, label = f"{prefix}.{last}".strip("."), index["objnames"][str(kind)]
            around = f"{prefix} {last} {label[2]} {index['titles'][page]}".lower()
            for term in terms:
                if term in name.lower() and all(other in around for other in terms - {term}):
                    tail = name.lower().rpartition(".")[2]
                    score = 11 if term in {name.lower(), tail} else 6 * (term in tail)
                    place = {"": name, "-": f"{label[1]}-{name}"}.get(anchor, anchor)
                    shown = score + {0: 15, 1: 5, 2: -5}.get(priority, 0)
                    yield shown, name, f"{index['docnames'][page]}#{place}"


def _words(index: Mapping[str, Any], query: str) -> Iterator[tuple[float, str, str]]:
    # Pages that have all words of the query, by the best of these.
    from sphinx.search.en import SearchEnglish

    english = SearchEnglish({})
    terms = {english.stem(word) for word in re.findall(r"\w+", query) if word not in english.stopwords}
    scores: dict[int, dict[str, int]] = {}
    for term in terms:
        for where, whole, part in (("terms", 5, 2), ("titleterms", 15, 7)):
            known = index[where]
            near = [each for each in known if term in each and len(term) > 2]
            matches = [term] if term in known else near
            for match in matches:
                pages = known[match]
                for page in pages if isinstance(pages, list) else [pages]:
                    scores.setdefault(page, {})[term] = whole if match == term else part
    for page, found in scores.items():
        if len(found) in {len(terms), sum(len(term) > 2 for term in terms)}:
            yield max(found.values()), index["titles"][page], f"{index['docnames'][page]}#"


def main(folder: str, version: str) -> int:
    """Look at a version of a site. Returns the exit status."""
    found = problems(Path(folder), Path(folder) / version)
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The site of ``make docs``: its front page, versions, search and checks, without building it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import front
import publish
import uses
import verify
from figures import FIGURES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GROUPS = ["Start here", "Guides", "Reference", "Understand", "Develop"]


def page(title="t", body="", head=""):
    return f"<html><head><meta charset=utf-8><title>{title}</title>{head}</head><body>{body}</body></html>"


def made(folder, **pages):
    """A site with one version, whose search finds nothing."""
    built = folder / "dev"
    index = "alltitles", "indexentries", "objects", "terms", "titleterms"
    found = {"docnames": [], "titles": [], "objnames": {}} | {name: {} for name in index}
    files = {"index.html": page(body="".join(f'<a href="{near}"></a>' for near in verify.NEAR))}
    files |= {near: page(near) for near in verify.NEAR}
    files |= {f"{name}.html": text for name, text in pages.items()}
    for name, text in {**files, "searchindex.js": f"Search.setIndex({json.dumps(found)})"}.items():
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        (built / name).write_text(text)
    return folder, built


def filled(readme=README):
    reference = {"distdl_rma": "docs/reference/distdl_rma"}
    return front.filled((ROOT / "index.md").read_text(), readme, reference, "version 1")


def test_the_readme_has_its_links_in_groups_and_the_front_page_shows_them():
    assert list(front.groups(README)) == GROUPS
    shown = filled()
    assert "{{" not in shown
    titles = re.findall(r"^\*\*(.*)\*\*$", shown, re.MULTILINE)
    assert [title for title in titles if title in GROUPS] == GROUPS
    first = shown.partition("## In more detail")[0]
    pages = [f"docs/{name}.md" for name in ("recipe", "larger-than-memory", "benchmarks")]
    assert [wanted for wanted in (*pages, "pip install", "version 1") if wanted not in first] == []
    assert len(re.findall("  # was ", first)) == 3
    assert "make docs" not in first


def test_the_front_page_has_all_of_the_readme():
    told = README.partition("## Documentation")[0].split("\n\n")[1:]
    assert [part for part in told if part.strip() not in filled()] == []


def test_a_section_about_gains_comes_before_the_installation_and_its_picture_after():
    head, *rest = re.split(r"(?m)^(?=## )", README)
    section = (
        "## What do I gain?\n\nMuch.\n\n![A picture](a.png)\n\n*Seen from above.*\n\n**Costs** little.\n\n"
    )
    shown = filled("".join([head, section, *rest]))
    parts = "## What do I gain", "Much.", "**Costs**", "pip install", "![A p", "*Seen"
    places = [*map(shown.index, parts)]
    assert places == sorted(places)


def test_a_version_with_changes_since_its_release_is_the_development_version():
    name, told = publish.version("## [Unreleased]\n\n### Added\n\n- x\n\n## [0.1.0] - 2026-11-25\n\n- y\n")
    assert name == "dev"
    assert publish.distdl_rma.__version__ in told
    assert publish.version("## [Unreleased]\n\n## [0.1.0]\n\n- y\n")[0] == publish.distdl_rma.__version__


def test_versions_are_in_order_and_the_newest_release_is_the_latest(tmp_path):
    for name in ("0.2.0", "dev", "0.10.0"):
        (tmp_path / name / "docs").mkdir(parents=True)
        for file in ("objects.inv", "index.html", "docs/a.html"):
            (tmp_path / name / file).touch()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "gone.html").touch()
    publish.index(tmp_path)
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found == {"latest": "0.10.0", "versions": ["dev", "0.10.0", "0.2.0"]}
    stubs = [path for path in tmp_path.rglob("*.html") if "location.replace" in path.read_text()]
    names = [str(path.relative_to(tmp_path)) for path in stubs]
    assert sorted(names) == ["index.html", "latest/docs/a.html", "latest/index.html"]
    assert not (tmp_path / "latest" / "gone.html").exists()
    for path in stubs:
        target = re.search(r"url=(.*?)\"", path.read_text())[1]
        assert (path.parent / target).resolve().parts[len(tmp_path.parts)] == "0.10.0"
        assert (path.parent / target).exists()
    links = re.findall(r'href="(.*?)"', (tmp_path / "versions.html").read_text())
    assert links == ["dev/index.html", "0.10.0/index.html", "0.2.0/index.html"]


def test_a_development_version_is_the_latest_where_nothing_else_is(tmp_path):
    site, _ = made(tmp_path)
    (site / "dev" / "objects.inv").touch()
    publish.index(site)
    assert json.loads((site / "versions.json").read_text())["latest"] == "dev"


def test_the_pages_around_versions_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "SEARCHES", {})
    site, built = made(tmp_path)
    (built / "objects.inv").touch()
    publish.index(site)
    assert verify.problems(site, built) == []


LINKS = "#here", "docs/recipe.html", "https://a.b/c"
PROBLEMS = {
    "": ('<a id="here"></a>' + "".join(f'<a href="{link}"></a>' for link in LINKS), ""),
    "file": ('<a href="docs/none.html"></a>', "dead link docs/none.html"),
    "heading": ('<a href="docs/recipe.html#none"></a>', "dead link docs/recipe.html#none"),
    "own heading": ('<a href="#none"></a>', "dead link #none"),
    "alt": ('<a class="picture" href=""><img src=""></a>', "no text for those who do not see it"),
    "size": ('<img alt="a dot" src=""/><br/>', "not in a link to its full size"),
    "table": ('<div class="table-wrapper"></div><table><tr><td></table>', "not in a box that scrolls"),
    "boxed": ('<div class="table-wrapper"><br><table><tr><td></table></div>', ""),
}


@pytest.mark.parametrize(("body", "told"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_wrong_with_a_page_is_named(tmp_path, monkeypatch, body, told):
    monkeypatch.setattr(verify, "SEARCHES", {})
    found = verify.problems(*made(tmp_path, x=page("x", body)))
    assert len(found) == bool(told)
    assert all(line.startswith("dev/x.html: ") and told in line for line in found)


def test_titles_that_pages_share_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "SEARCHES", {})
    found = verify.problems(*made(tmp_path, x=page("same"), y=page("same")))
    assert found == ["2 pages have the title 'same'"]


def test_a_page_that_is_far_from_the_front_page_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "SEARCHES", {})
    monkeypatch.setattr(verify, "NEAR", ("docs/recipe.html", "x.html"))
    site, built = made(tmp_path)
    (built / "index.html").write_text(page(body='<a href="docs/recipe.html"></a>'))
    assert verify.problems(site, built) == ["x.html is not linked from the front page"]


INDEX = {
    "docnames": ["a", "b", "c"],
    "titles": ["Resume", "Others", "Words"],
    "alltitles": {"Resume": [[0, None]], "Others": [[1, None]], "To resume": [[2, "how"]]},
    "indexentries": {"killed": [[1, "after", True]], "resume": [[1, "after", False]]},
    "objects": {"torch": [[2, 0, 0, "", "cumsum"], [2, 0, 0, "", "cumsum_"]]},
    "objnames": {"0": ["function", "torch", "function of torch or torch.nn.functional"]},
    "terms": {"resum": [1, 2], "kill": 2, "cumsum": [0]},
    "titleterms": {"resum": 0},
}


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("resume", ["a#", "a#", "c#how", "b#", "c#", "b#after"]),
        ("killed", ["b#after", "c#"]),
        ("torch.nn.functional.cumsum", ["c#torch.cumsum"]),
        ("cumsum", ["c#torch.cumsum", "c#torch.cumsum_", "a#"]),
        ("nothing", []),
    ],
)
def test_the_search_finds_entries_then_titles_and_names_then_words(query, places):
    pytest.importorskip("sphinx", reason="the stems of words are Sphinx's")
    assert list(dict.fromkeys(verify.hits(INDEX, query)))[: len(set(places))] == list(dict.fromkeys(places))


def test_words_that_lead_to_a_heading_stand_below_it():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    comments = {path: re.findall(r"(?ms)^([^\n]*)\n\n<!-- (.*?) -->\n\n", path.read_text()) for path in pages}
    words = [(heading, text) for found in comments.values() for heading, text in found if "search" in text]
    assert len(words) == sum(path.read_text().count("\n<!-- search") for path in pages) > 10
    for heading, text in words:
        assert heading.startswith("#")
        assert text.startswith("search: ")


def test_a_name_of_the_reference_shows_the_examples_and_guides_that_use_it():
    examples, guides = uses.used()
    assert Path("examples/recipe.py") in examples["distribute"]
    assert Path("examples/rehearse.ipynb") in examples["rehearse"]
    assert "../checkpoints.html" in [address for _, address in guides["Checkpoints"]]
    assert guides["predict"][0] == ("Larger than memory: Prediction", "../larger-than-memory.html#prediction")
    assert uses.shown("no_such_name") == []
    assert uses.shown("spill")[1] == ".. rubric:: Used in"


@pytest.mark.parametrize("picture", [*FIGURES, "architecture"])
def test_texts_of_drawings_can_be_read_in_a_column(picture):
    assert not verify.has_small_text(ROOT / "docs" / "images" / f"{picture}.svg")


def test_wide_drawings_with_small_texts_are_known(tmp_path):
    (tmp_path / "x.svg").write_text('<svg width="720pt"><text style="font: 700 8px sans-serif"/></svg>')
    assert verify.has_small_text(tmp_path / "x.svg")
    assert verify.has_small_text(tmp_path / "photograph.png")


def test_what_is_wide_scrolls_and_pictures_fit():
    rules = (ROOT / "docs" / "static" / "site.css").read_text()
    assert re.search(r"article img[^{]*\{[^}]*max-width: 100%", rules)
    assert re.search(r"article code[^{]*\{[^}]*overflow-wrap: anywhere", rules)
    assert "a.picture::after" in rules

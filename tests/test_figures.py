"""Every page about layers has its figure, it is the one that the code draws, and it can be read."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from figures import FIGURES, drawn

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = sorted((ROOT / "docs" / "layers").glob("*.md"))

each_figure = pytest.mark.parametrize("page", FIGURES)


@each_figure
@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_figure_of_a_page_is_what_the_code_draws(page):
    assert (IMAGES / f"{page}.svg").read_text() == drawn(page), "run docs/figures.py"


@each_figure
def test_a_figure_does_not_depend_on_the_style_of_the_user(page):
    expected = drawn(page)
    style = {"font.size": 20, "svg.fonttype": "path", "lines.linewidth": 5, "axes.facecolor": "k"}
    with mpl.rc_context(style):
        assert drawn(page) == expected
    assert "<dc:date>" not in expected


@each_figure
def test_texts_of_a_figure_lie_on_the_sheet_and_not_on_each_other(page):
    figure = FIGURES[page]().figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    shown = [text for text in figure.axes[0].texts if text.get_text()]
    boxes = {text: text.get_window_extent(renderer) for text in shown}
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for one, other in itertools.combinations(shown, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


@each_figure
def test_figures_are_small_files(page):
    assert (IMAGES / f"{page}.svg").stat().st_size < 60_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_about_layers_shows_its_figure_below_its_heading(page):
    heading, blank, figure, *_ = page.read_text().splitlines()
    assert heading.startswith("# ")
    assert not blank
    assert re.fullmatch(rf"!\[[^\]]+\]\(\.\./images/{page.stem}\.svg\)", figure)


def test_every_figure_has_its_page():
    assert set(FIGURES) == {page.stem for page in PAGES}
    others = {"architecture", "benchmarks", "scaling"}
    assert {image.stem for image in IMAGES.glob("*.svg")} == {*FIGURES} | others

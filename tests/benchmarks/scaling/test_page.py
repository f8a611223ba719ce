"""The page on scaling is what the model makes of the constants that are kept."""

from __future__ import annotations

import pytest

from benchmarks.scaling import __main__ as command
from benchmarks.scaling import page
from benchmarks.scaling.forecast import checks, grid_of
from benchmarks.scaling.model import Constants

pytestmark = pytest.mark.slow


def test_the_page_is_what_the_model_makes_of_the_constants():
    text = command.PAGE.read_text()
    assert command.documented(text) == text, "run python -m benchmarks.scaling docs"


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_figure_is_what_the_model_makes_of_the_constants():
    assert command.IMAGE.read_text() == command.picture(), "run python -m benchmarks.scaling docs"


def test_a_prediction_is_the_sum_of_its_parts():
    for check in checks(Constants.read()):
        assert check.predicted.seconds == pytest.approx(sum(page.parts_of(check.predicted)))
        assert min(page.parts_of(check.predicted)) >= 0


def test_grids_are_as_square_as_powers_of_two_allow():
    assert grid_of(1, 2) == (1, 1, 1, 1)
    assert grid_of(8, 2) == (1, 1, 4, 2)
    assert grid_of(4096, 3) == (1, 1, 16, 16, 16)


def test_constants_are_of_one_kind_of_machine():
    assert page.machine_of({"a": ["c", "d", "s", "m"], "b": ["c", "e", "s", "m"]}) == "m"
    with pytest.raises(ValueError, match="too many"):
        page.machine_of({"a": ["c", "d", "s", "m"], "b": ["c", "e", "s", "n"]})

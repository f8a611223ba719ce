"""The notebook, whose cells run one after the other as in Jupyter, and the picture that it shows."""

import json

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests.examples.launching import EXAMPLES

pytestmark = pytest.mark.slow

NOTEBOOK = EXAMPLES / "rehearse.ipynb"


@pytest.fixture
def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_is_kept_without_results(cells):
    for cell in cells:
        assert cell["cell_type"] != "code" or (cell["execution_count"], cell["outputs"]) == (None, [])


def test_the_notebook_shows_no_difference_and_the_seams_without_halo(cells, monkeypatch):
    mpl.use("agg")
    shown, names = [], {"__name__": "__main__"}
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            # Each of its own, as in Jupyter; what it asserts holds.
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    (figure,) = shown
    pictures = {axis.get_title(): np.asarray(axis.images[0].get_array()) for axis in figure.axes}
    assert len(figure.axes[0].patches) == 4
    assert pictures["split: no difference"].max() == 0
    seams = pictures["without halo: seams"] > 0
    beside = np.zeros(128, bool)
    beside[63:65] = True
    assert seams.any() and not (seams & ~(beside[:, None] | beside)).any()
    plt.close(figure)

"""The demo of an image that is larger than memory, small, as a user runs it."""

from __future__ import annotations

import re
import runpy
import sys

import numpy as np
import pytest
import skimage.io
from torch import nn

from tests.examples.launching import EXAMPLES
from tests.run_mpi import completed

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "large.py"


def test_an_image_that_does_not_fit_is_predicted_without_seams(tmp_path):
    folder = tmp_path / "out"
    small = "--side", "640", "--tile", "128", "--memory", "90", "--check"
    done = completed([sys.executable, str(DEMO), *small, "--output", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"slabs +\d+ along", done.stdout) and "functions need all slabs" in done.stdout
    tiles, whole = (
        float(re.search(rf"{name} differs from the whole by (\S+) at most", done.stdout)[1])
        for name in ("tiles", "predict")
    )
    assert whole < 1e-4 < 0.1 < tiles
    assert skimage.io.imread(folder / "large.png").size


@pytest.mark.parametrize("tile", [32, 58, 75, 256])
def test_tiles_of_any_size_cover_the_image(tmp_path, tile):
    demo, file = runpy.run_path(str(DEMO)), tmp_path / "image.npy"
    demo["write_image"](file, 256)
    assert np.array_equal(demo["by_tiles"](nn.Identity(), file, 256, tile), np.load(file))


def test_a_tile_that_is_larger_than_the_image_is_refused(tmp_path):
    done = completed([sys.executable, str(DEMO), "--side", "100", "--output", str(tmp_path / "out")])
    assert done.returncode == 2 and "at most those of the image" in done.stderr
    assert not (tmp_path / "out").exists()

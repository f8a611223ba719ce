"""Places of crops and orders: alike on all ranks, and those of every version."""

import numpy as np
import pytest

from distdl_rma import ArgumentError, ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.jobs.data.draws import Crops, permutation


def test_crops_are_at_every_place_that_fits_equally_often():
    crops = Crops((3,), 1)
    starts = [crops.draw((6,), 1, key).start[0] for key in range(4000)]
    counts = np.bincount(starts)
    assert len(counts) == 4 and counts.min() > 850 and counts.max() < 1150


def test_draws_are_those_of_every_version():
    crops = Crops((3, slice(1, None)), 2)
    assert [crops.draw((9, 8), 2, 7, 1, item).start for item in range(4)] == [(0, 1), (4, 1), (2, 1), (6, 1)]
    assert crops.draw((9, 8), 2, 7, 1, 5).shape == (3, 7)
    assert Crops(None, 2).draw((9, 8), 0) == Box.of_shape((9, 8))
    assert permutation(8, 1, 7, 0).tolist() == [4, 7, 6, 5, 3, 0, 2, 1]


@pytest.mark.parametrize(
    ("crop", "dims", "message"),
    [
        ((3, 3), 3, r"samples have 3 spatial dimensions, but crop has 2: \(3, 3\)"),
        (5, 2, "samples have 2 spatial dimensions, but crop has 0: 5"),
        ((0,), 1, "crop has for each spatial dimension an extent"),
        ((slice(3, 3),), 1, "a slice with start < stop"),
        ((slice(0, 8, 2),), 1, "a slice with start < stop"),
        ((2.5,), 1, r"got 2\.5"),
        ((True,), 1, "got True"),
    ],
)
def test_arguments_of_no_known_form_are_refused(crop, dims, message):
    with pytest.raises(ArgumentError, match=message):
        Crops(crop, dims)


@pytest.mark.parametrize(
    ("crop", "message"),
    [
        ((8, 2), r"the crop 8 of dimension H does not fit into a sample of extents \(7, 5\)"),
        ((slice(0, 7), slice(2, 6)), r"the crop 2:6 of dimension W does not fit"),
    ],
)
def test_a_crop_that_does_not_fit_is_refused(crop, message):
    with pytest.raises(ShapeError, match=message):
        Crops(crop, 2).draw((7, 5), 0)

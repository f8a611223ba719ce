"""Views of samples: boxes of them are read as numpy crops, flips and turns the whole sample."""

from itertools import product

import numpy as np
import pytest
import torch

from distdl_rma import ArgumentError, ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.jobs.data.augmentation import Augmentation, View, permutation

LETTERS = {1: "W", 2: "HW", 3: "DHW"}
EXTENTS = (7, 5, 6)


def boxes(shape, parts):
    """Blocks of a grid with so many parts in each dimension, uneven ones too."""
    edges = [np.linspace(0, n, parts + 1).astype(int) for n in shape]
    for place in product(range(parts), repeat=len(shape)):
        yield Box(tuple((int(e[i]), int(e[i + 1])) for e, i in zip(edges, place, strict=True)))


def shown(view, sample):
    """What a view shows of a numpy array, by numpy on the whole."""
    found = sample[tuple(slice(a, b) for a, b in view.crop.bounds)]
    found = np.flip(found, tuple(view.flipped))
    return np.swapaxes(found, *view.swapped) if view.swapped else found


def read(view, sample, box):
    """A box of a view, read as the dataset reads it."""
    part = sample[tuple(slice(a, b) for a, b in view.source(box).bounds)]
    return view.turned(torch.from_numpy(np.array(part, order="C"))).numpy()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("crop", [None, "extents", "slices"])
def test_boxes_of_a_view_are_those_of_numpy_on_the_whole_sample(dims, crop):
    extents = EXTENTS[:dims]
    sample = np.arange(np.prod(extents)).reshape(extents)
    given = {None: None, "extents": (4, 3, 5)[:dims], "slices": (slice(1, 5), slice(None), 2)[:dims]}[crop]
    rotate = "HW" if dims > 1 and crop == "extents" else ""
    augmentation = Augmentation(given, LETTERS[dims], rotate, dims)
    seen = set()
    for key in range(60):
        view = augmentation.draw(extents, 3, key)
        whole = shown(view, sample)
        seen.add(whole.tobytes())
        assert whole.shape == view.shape
        for parts in (1, 2, 3, 4):
            for box in boxes(view.shape, parts):
                own = whole[tuple(slice(a, b) for a, b in box.bounds)]
                assert np.array_equal(read(view, sample, box), own)
    assert len(seen) > 1


@pytest.mark.parametrize("plane", ["HW", "DW", "WD"])
def test_a_drawn_view_is_a_quarter_turn_of_a_flipped_crop(plane):
    sample = np.random.default_rng(0).integers(0, 1 << 30, (6, 6, 6))
    at = tuple("DHW".index(letter) for letter in plane)
    turned = {
        np.rot90(np.flip(sample, flips), turns, at).tobytes()
        for turns in range(4)
        for flips in [(), (0,), (1,), (0, 1)]
    }
    augmentation = Augmentation(None, "DH", plane, 3)
    drawn = {shown(augmentation.draw(sample.shape, key), sample).tobytes() for key in range(300)}
    assert drawn == turned


def test_crops_are_at_every_place_that_fits_equally_often():
    augmentation = Augmentation((3,), "", "", 1)
    starts = [augmentation.draw((6,), 1, key).crop.start[0] for key in range(4000)]
    counts = np.bincount(starts)
    assert len(counts) == 4 and counts.min() > 850 and counts.max() < 1150


def test_draws_are_those_of_every_version():
    view = Augmentation((3, 2), "HW", "HW", 2).draw((9, 8), 2, 7, 1, 5)
    assert view == View(Box(((2, 5), (4, 6))), frozenset({1}), ())
    assert permutation(8, 1, 7, 0).tolist() == [4, 7, 6, 5, 3, 0, 2, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint16])
def test_a_flip_takes_elements_of_any_type_and_leaves_no_copy(dtype):
    part = torch.arange(2 * 37 * 5).reshape(2, 37, 5).to(torch.uint8).view(torch.uint8).to(dtype)
    whole, memory = part.clone(), part.data_ptr()
    view = View(Box.of_shape((37, 5)), frozenset({0, 1}))
    assert view.turned(part).data_ptr() == memory
    assert part.tolist() == [rows[::-1] for rows in [[row[::-1] for row in two] for two in whole.tolist()]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "D", "", 2), r"flip names dimensions, each once, of 'HW', got 'D'"),
        ((None, "HH", "", 2), "flip names"),
        ((None, 1, "", 2), "flip names"),
        ((None, "", "H", 2), "rotate names two dimensions of 'HW', got 'H'"),
        (((3, 3), "", "", 3), r"samples have 3 spatial dimensions, but crop has 2: \(3, 3\)"),
        ((5, "", "", 2), "samples have 2 spatial dimensions, but crop has 0: 5"),
        (((0,), "", "", 1), "crop has for each spatial dimension an extent"),
        (((slice(3, 3),), "", "", 1), "a slice with start < stop"),
        (((slice(0, 8, 2),), "", "", 1), "a slice with start < stop"),
        (((2.5,), "", "", 1), r"got 2\.5"),
        (((True,), "", "", 1), "got True"),
    ],
)
def test_arguments_of_no_known_form_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Augmentation(*arguments)


@pytest.mark.parametrize(
    ("crop", "rotate", "message"),
    [
        ((8, 2), "", r"the crop 8 of dimension H does not fit into a sample of extents \(7, 5\)"),
        ((slice(0, 7), slice(2, 6)), "", r"the crop 2:6 of dimension W does not fit"),
        (None, "HW", r"rotate='HW': a view of extents \(7, 5\) of a sample of \(7, 5\) cannot be turned"),
        ((6, 3), "HW", "cannot be turned"),
        ((slice(0, 3), slice(0, 2)), "HW", "cannot be turned"),
    ],
)
def test_a_crop_or_a_turn_that_does_not_fit_is_refused(crop, rotate, message):
    with pytest.raises(ShapeError, match=message):
        Augmentation(crop, "", rotate, 2).draw((7, 5), 0)

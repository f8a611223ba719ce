"""How the messages of a channel are cut into steps, and how its lanes lie in a buffer."""

import itertools
import math

import pytest

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.exchange import Piece
from distdl_rma.segments.lanes import _LARGEST_STEP_NBYTES, _STEP_NBYTES, _ends, in_steps


def piece(*shape, peer=1):
    return Piece(peer, Box(tuple((3, 3 + extent) for extent in shape)))


@pytest.mark.parametrize(
    "shape", [(5,), (3, 1 << 20), (1, 7 << 18), (1, 1, 3), (2, 1 << 18, 3), (0, 5), (1 << 21,)]
)
@pytest.mark.parametrize("itemsize", [1, 4, 16])
def test_steps_of_a_piece_are_its_elements_in_their_order(shape, itemsize):
    whole = piece(*shape)
    parts = in_steps((whole,), itemsize)
    assert sum(part.box.volume for part in parts) == math.prod(shape)
    cut = [d for d in range(len(shape)) if any(part.box.bounds[d] != whole.box.bounds[d] for part in parts)]
    assert len(cut) <= 1
    for dim in cut:
        # One behind the other, along the first dimension that has several: row-major as a whole.
        assert all(extent == 1 for extent in shape[:dim])
        ends = [whole.box.bounds[dim][0], *(part.box.bounds[dim][1] for part in parts)]
        assert [part.box.bounds[dim] for part in parts] == list(itertools.pairwise(ends))
    small = math.prod(shape) * itemsize <= _STEP_NBYTES
    assert (len(parts) == 1) == (small or shape[-1] == math.prod(shape) == 1)


def test_steps_grow_with_the_message_and_remain_a_few():
    for megabytes, steps in ((1, 1), (2, 2), (4, 4), (7, 4), (16, 4), (17, 5), (64, 16)):
        parts = in_steps((piece(megabytes * _STEP_NBYTES // 4, 4),), 1)
        assert len(parts) == steps and len(_ends(parts, 1)) == steps
        sizes = [part.box.volume for part in parts]
        assert min(sizes) >= _STEP_NBYTES and max(sizes) <= _LARGEST_STEP_NBYTES


def test_a_step_ends_behind_a_megabyte_and_at_the_end():
    many = tuple(piece(_STEP_NBYTES // 4) for _ in range(6))
    assert _ends(many, 1) == (3, 5)
    assert _ends(many[:4], 1) == (3,) and _ends(many[:1], 1) == (0,)
    assert _ends(many, 4) == (0, 1, 2, 3, 4, 5)

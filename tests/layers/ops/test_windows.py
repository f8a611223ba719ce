"""Windows: what there must be to pool."""

import pytest

from distdl_rma import ShapeError
from distdl_rma.layers.ops.windows import extents_to_pool


def test_there_must_be_something_to_pool():
    assert extents_to_pool((0, 2, 3, 4)) == (3, 4)
    with pytest.raises(ShapeError, match=r"the global input \(1, 2, 0, 4\) has no elements to pool"):
        extents_to_pool((1, 2, 0, 4))

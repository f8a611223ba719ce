"""All ranks refuse what one of them passes."""

import pytest

from distdl_rma import ShapeError


def refused(comm, loss, x, target, words):
    """A call raises the same ShapeError on all ranks, again and again."""
    for _ in range(2):
        with pytest.raises(ShapeError, match=words) as caught:
            loss(x, target)
        assert len(set(comm.allgather(str(caught.value)))) == 1

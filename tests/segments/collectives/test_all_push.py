"""Everyone's vector to everyone, epoch after epoch."""

import numpy as np
import pytest

from distdl_rma import PeerFailedError, ProtocolError
from distdl_rma.segments.collectives.all_push import AllPush

pytestmark = pytest.mark.mpi


def test_an_epoch_is_waited_for_before_the_next(segments, closing, monkeypatch):
    rows = closing(AllPush(segments, segments.ranks, 1, np.int64, "strict"))
    rows.start(np.array([1]))
    with monkeypatch.context() as after:
        # What ended the wait before counts, where that was another rank's error.
        after.setitem(segments.notices.failures, 7, "ValueError: by hand")
        with pytest.raises(PeerFailedError, match=r"rank 7 failed.*by hand"):
            rows.start(np.array([2]))
    with pytest.raises(ProtocolError, match="'strict': started again before the last epoch was waited for"):
        rows.start(np.array([2]))
    assert (rows.wait() == 1).all()

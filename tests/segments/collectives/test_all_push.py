"""Everyone's vector to everyone, epoch after epoch."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ClosedError, MismatchError, PeerFailedError, ProtocolError
from distdl_rma.segments.collectives.all_push import AllPush

pytestmark = pytest.mark.mpi


def test_a_rank_that_runs_ahead_overwrites_nothing_that_others_still_read(segments, comm):
    rows, mine = AllPush(segments, segments.ranks[::-1], 100, np.int32, "ahead"), random.Random(comm.rank)
    for epoch in range(200):
        rows.start(np.full(100, 1000 * comm.rank + epoch, np.int32))
        if mine.random() < 0.05:
            time.sleep(1e-3)
        expected = [1000 * rank + epoch for rank in segments.ranks[::-1]]
        assert (rows.wait() == np.array(expected)[:, None]).all()
    rows.close()


def test_an_epoch_is_waited_for_before_the_next(segments, monkeypatch):
    rows = AllPush(segments, segments.ranks, 1, np.int64, "strict")
    rows.start(np.array([1]))
    with monkeypatch.context() as after:
        # What ended the wait before counts, where that was another rank's error.
        after.setitem(segments.notices.failures, 7, "ValueError: by hand")
        with pytest.raises(PeerFailedError, match=r"rank 7 failed.*by hand"):
            rows.start(np.array([2]))
    with pytest.raises(ProtocolError, match="'strict': started again before the last epoch was waited for"):
        rows.start(np.array([2]))
    assert (rows.wait() == 1).all()
    rows.close()
    with pytest.raises(ClosedError, match="'strict': already closed"):
        rows.wait()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_mean_something_else_by_a_name_learn_what(segments, comm):
    rows = AllPush(segments, segments.ranks, 1, np.int64, "terms", f"depth={comm.rank}")
    with pytest.raises(MismatchError, match=r"depth is \d on rank \d and \d on rank \d"):
        rows.connect()
    comm.Barrier()
    rows.close()

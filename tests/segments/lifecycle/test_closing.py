"""Closing: nobody frees before all have come, and who gave up has not left."""

import time

import pytest

from distdl_rma.errors import ExchangeTimeout


@pytest.mark.mpi(min_size=2)
def test_rank_whose_close_timed_out_has_not_left(comm):
    from distdl_rma.segments import SegmentManager

    manager = SegmentManager(comm, None, "8MiB", 15)
    others = {rank: () for rank in manager.ranks if rank != comm.rank}
    buffer = manager.get_segment_buffer(0, 1, "letters")
    peers = buffer.exchange(others, "letters")
    comm.Barrier()
    if comm.rank == 1:
        # Twice: what was taken back once can be said again, and taken back again.
        for _ in range(2):
            with pytest.raises(ExchangeTimeout, match=r"for ranks? 0.* to close the machine"):
                manager.close(timeout=0.3)
        # Longer than it takes until who has left is believed to have left.
        time.sleep(1.5)
        peers[0].notify(0)
    elif comm.rank == 0:
        buffer.notify_wait(0)
    comm.Barrier()
    manager.close()

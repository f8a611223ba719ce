"""Groups of ranks, and their barrier."""

import gc
import random
import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, MismatchError
from distdl_rma.segments import Group

pytestmark = pytest.mark.mpi


def test_nobody_passes_a_barrier_before_all_have_come(segments, closing, comm):
    group, mine = closing(Group(segments)), random.Random(comm.rank)
    come = segments.get_segment_buffer(8)
    peers = come.exchange(dict.fromkeys(segments.ranks, ()), "come")
    come.view(np.int64, (1,))[0] = 0
    group.barrier()
    for epoch in range(1, 60):
        if mine.random() < 0.1:
            time.sleep(1e-3)
        come.here.fetch_add(0, 1)
        group.barrier()
        for peer in peers.values():
            assert peer.fetch_add(0, 0) >= epoch
    group.barrier()
    come.free()


@pytest.mark.mpi(min_size=2)
def test_a_barrier_names_who_is_missing_and_can_be_repeated(segments, closing, comm):
    group = closing(Group(segments, name="team"))
    group.barrier()
    late = comm.size - 1
    for _ in range(2):
        comm.Barrier()
        if comm.rank == late:
            comm.Barrier()
        else:
            with pytest.raises(ExchangeTimeout):
                group.barrier(timeout=0)
            # Until the others have come, they are missing as well.
            missing, deadline = "", time.monotonic() + 30
            while f"for rank {late} to reach 'team (barrier)'" not in missing:
                assert time.monotonic() < deadline, missing
                with pytest.raises(ExchangeTimeout) as caught:
                    group.barrier(timeout=0.05)
                missing = str(caught.value)
            comm.Barrier()
        group.barrier()


@pytest.mark.mpi(min_size=2)
def test_who_gave_up_waiting_still_lets_the_others_through(segments, closing, comm):
    group, second = (closing(Group(segments, name=name)) for name in ("left", "other"))
    second.barrier()
    group.barrier()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout):
            group.barrier(timeout=0.05)
        comm.Barrier()
        # Waits for something else while the others go through the first barrier.
        second.barrier()
        group.barrier()
    else:
        comm.Barrier()
        group.barrier()
        second.barrier()


def test_a_group_that_is_dropped_by_all_gives_its_memory_back(segments, comm):
    Group(segments, name="dropped").barrier()
    gc.collect()
    comm.Barrier()
    assert "dropped (barrier)" not in segments.stats().owners


@pytest.mark.mpi(min_size=2)
def test_a_first_rank_that_means_something_else_is_noticed_on_its_node_and_by_one_rank_of_each_other(
    segments, closing
):
    name = "other" if segments.rank == 0 else "same"
    job = closing(Group(segments).broadcast(5, np.int64, name=name))
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    if 0 in node or segments.rank == node[0]:
        with pytest.raises(MismatchError, match=r"'(other|same)( \(connect\))?' but rank \d connects"):
            job.connect()
    else:
        job.connect()

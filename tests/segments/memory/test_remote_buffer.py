"""A peer's buffer: which bytes are meant, near and far; puts, gets and notifications."""

import numpy as np
import pytest
import torch


@pytest.mark.mpi
def test_values_are_broadcast_and_converted_without_loss_only(there):
    array = there.view(np.float64, (3, 4))
    # Puts to one place have no order without a flush between them.
    array[...] = 0
    there.flush()
    array[1] = np.arange(4, dtype=np.int32)
    there.flush()
    array[:, 2] = torch.tensor([5.0, 6.0, 7.0])
    array[0, ::-3] = 0.1
    there.flush()
    assert array[...].tolist() == [[0.1, 0, 5, 0.1], [0, 1, 6, 3], [0, 0, 7, 0]]


@pytest.mark.mpi
def test_a_view_of_ones_own_buffer_may_overlap_what_is_put_into_it(meet, comm):
    buffer, remotes = meet(800)
    mine = buffer.view(np.int64, (100,))
    mine[:] = np.arange(100)
    remotes[comm.rank].view(np.int64, (100,))[1:] = mine[:-1]
    assert mine.tolist() == [0, *range(99)]
    remotes[comm.rank].get(mine[:99], 8)
    assert mine.tolist() == [*range(99), 98]


@pytest.mark.mpi
def test_a_remote_array_is_a_sequence_of_rows_and_an_array(around):
    remote = around[2]
    there = remote.view(np.int16, (2, 3))
    there[...] = [[1, 2, 3], [4, 5, 6]]
    remote.flush()
    assert len(there) == 2 and [row.tolist() for row in there] == [[1, 2, 3], [4, 5, 6]]
    assert np.asarray(there).tolist() == np.array(there, np.float64).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [0, 1, 7, 64, 4097, 1 << 20, 5 << 20])
def test_what_is_put_is_there_after_the_notification_and_nothing_around_it(meet, comm, nbytes):
    buffer, remotes = meet(nbytes + 16, 1)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer.array[:] = 255
    comm.Barrier()
    data = np.random.default_rng(comm.rank).integers(0, 255, nbytes).astype(np.uint8)
    remotes[after].put_notify(data, 0, 9, offset=8)
    data[:] = 0
    assert buffer.notify_wait(0) == 9
    wanted = np.random.default_rng(before).integers(0, 255, nbytes).astype(np.uint8)
    assert (buffer.array[8 : 8 + nbytes] == wanted).all()
    assert (buffer.array[:8] == 255).all() and (buffer.array[8 + nbytes :] == 255).all()


@pytest.mark.mpi
@pytest.mark.parametrize("shift", [-(1 << 10), 1 << 10])
def test_a_buffer_may_be_moved_within_itself(meet, comm, shift):
    buffer, _ = meet(3 << 20)
    values = np.random.default_rng(comm.rank).integers(0, 255, 2 << 20).astype(np.uint8)
    part = buffer.view(np.uint8, values.shape, 1 << 19)
    part[...] = values
    buffer.here.put(part, offset=(1 << 19) + shift)
    buffer.here.flush()
    assert (buffer.view(np.uint8, values.shape, (1 << 19) + shift) == values).all()

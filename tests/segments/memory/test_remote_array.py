"""Slices of a peer's array, put and got as numpy's."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given

from distdl_rma import ShapeError
from tests.segments.strategies import slices

pytestmark = pytest.mark.mpi


def test_shapes_of_views_are_checked(there):
    for shape in ((2**32, 2**32), (1 << 62, 2), (there.nbytes + 1,)):
        with pytest.raises(ShapeError, match="not inside rank"):
            there.view(np.uint8, shape)
    for dtype, shape in ((np.uint8, (-1, 5)), (object, (1,))):
        with pytest.raises(ShapeError, match="no segment holds"):
            there.view(dtype, shape)


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(slices(), hypothesis.strategies.sampled_from(["uint8", "float32", ">i4", "complex128"]))
def test_slices_of_a_peers_array_are_those_of_numpy(there, shape_and_key, dtype):
    shape, key = shape_and_key
    model = np.array(np.arange(math.prod(shape)).reshape(shape) % 100, dtype)
    array = there.view(dtype, shape, 3)
    array[...] = model
    there.flush()
    part = np.asarray(model[key])
    assert array[key].dtype == dtype and array[key].shape == part.shape and (array[key] == part).all()
    model[key] = np.array(part[::-1] if part.ndim else part) + model.dtype.type(50)
    array[key] = np.array(model[key], dtype)
    there.flush()
    assert (array[...] == model).all()


def test_values_are_broadcast_and_converted_without_loss_only(there):
    array = there.view(np.float64, (3, 4))
    array[...] = 0
    array[1] = np.arange(4, dtype=np.int32)
    array[:, 2] = torch.tensor([5.0, 6.0, 7.0])
    array[0, ::-3] = 0.1
    there.flush()
    assert array[...].tolist() == [[0.1, 0, 5, 0.1], [0, 1, 6, 3], [0, 0, 7, 0]]
    for data in (
        np.zeros(5),
        np.zeros((3, 4, 1)),
        np.zeros(4, complex),
        "text",
        2**2000,
        [1, 2, 3],
        ["1", 2, 3, 4],
    ):
        with pytest.raises(ShapeError, match="put"):
            array[0] = data
    with pytest.raises(ShapeError, match="without a loss"):
        there.view(np.int32, (3,))[:] = 1.5


def test_a_slice_may_be_changed_after_it_was_put(there, machine):
    queue = machine.segments.queue()
    array, data = there.view(np.int64, (50, 2)), np.arange(50)
    array[:, 1] = data
    data[:] = -1
    array.put((slice(None), 0), data, queue)
    data[:] = -2
    there.flush()
    queue.wait()
    assert array[...].tolist() == [[-1, i] for i in range(50)]


def test_a_view_of_ones_own_buffer_may_overlap_what_is_put_into_it(meet, comm):
    buffer, remotes = meet(800)
    mine = buffer.view(np.int64, (100,))
    mine[:] = np.arange(100)
    remotes[comm.rank].view(np.int64, (100,))[1:] = mine[:-1]
    assert mine.tolist() == [0, *range(99)]
    remotes[comm.rank].get(mine[:99], 8)
    assert mine.tolist() == [*range(99), 98]


def test_a_remote_array_is_a_sequence_of_rows_and_an_array(around):
    remote = around[2]
    there = remote.view(np.int16, (2, 3))
    there[...] = [[1, 2, 3], [4, 5, 6]]
    remote.flush()
    assert len(there) == 2 and [row.tolist() for row in there] == [[1, 2, 3], [4, 5, 6]]
    assert np.asarray(there).tolist() == np.array(there, np.float64).tolist() == [[1, 2, 3], [4, 5, 6]]
    point = remote.view(np.int16, ())
    for call in (len, iter):
        with pytest.raises(TypeError, match="without dimensions"):
            call(point)

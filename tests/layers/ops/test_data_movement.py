"""Operations that move tensors of known decompositions: results are where their outputs say."""

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite, movements_through
from distdl_rma.layers.ops.data_movement import StagedMove, all_sum_reduce, broadcast, joined

mpi = pytest.mark.mpi
NEEDS, SHAPE, F64 = GradientNeeds(True, False), (7, 5), torch.float64


def site(P_world, name="it"):
    return CallSite(Machine.of(P_world), name)


def grid(P_world, *shape):
    return P_world.create_cartesian_topology_partition(shape)


def part(decomposition, whole):
    """This rank's part of a global tensor, in memory of its own."""
    return whole[decomposition.slices()].clone() if decomposition.partition.active else whole.new_empty(0)


@mpi
def test_subtensors_of_any_shape_are_no_blocks_and_sums_need_equal_ones(P_world, comm):
    shapes = {rank: (at,) for at, rank in enumerate(P_world.ranks)}
    operation = broadcast(site(P_world), shapes, P_world, P_world, torch.float32)
    assert operation.output is None
    assert operation(NEEDS, torch.ones(comm.rank)).shape == (comm.rank,)
    if comm.size > 1:
        with pytest.raises(ShapeError, match=r"rank 0 passes \(0,\) but rank 1 \(1,\)"):
            all_sum_reduce(site(P_world), shapes, P_world, [0], torch.float32)


@mpi
def test_stages_there_and_back_are_the_identity_and_so_is_their_backward(P_world):
    rows, columns = (
        Decomposition.balanced(grid(P_world, *shape), SHAPE)
        for shape in ((P_world.size, 1), (1, P_world.size))
    )
    movements = movements_through(site(P_world), [(rows, columns), (columns, rows)], F64)
    operation = StagedMove(movements, torch.float32, rows)
    operation.connect()
    x = part(rows, torch.arange(35.0).reshape(SHAPE)).requires_grad_()
    y = operation(NEEDS, x)
    assert y.dtype == torch.float32 and torch.equal(y, x)
    y.backward(2 * x.detach())
    assert torch.equal(x.grad, 2 * x)


@mpi
def test_vectors_get_their_shape_back(P_world):
    line = Decomposition.balanced(grid(P_world, P_world.size), (12,))
    count, movements = line.own_box.volume, movements_through(site(P_world), [(line, line)], torch.int64)
    x = torch.arange(count)
    y = StagedMove(movements, torch.int64, None, (1, count))(GradientNeeds(False, False), x[:, None])
    assert torch.equal(y, x[None]) and y.data_ptr() != x.data_ptr()


def test_what_torch_would_not_concatenate_is_refused():
    assert joined([(2, 3, 4), (2, 0, 4)], [torch.int8, torch.float32]) == ((2, 3, 4), torch.float32)
    floats, others = [torch.float32, torch.float32], [torch.float64, torch.float8_e5m2]
    for second, dtypes, words in (
        ((2, 3), floats, r"Number of dimensions .* input 1 is \(2, 3\)"),
        ((1, 3, 4), floats, r"Expected 2 in dimension 0 .* input 1 is \(1, 3, 4\)"),
        ((2, 3, 4), others, r"Promotion .* of torch\.float64; input 1 .* torch\.float8_e5m2"),
    ):
        with pytest.raises(ShapeError, match=words):
            joined([(2, 3, 4), second], dtypes)

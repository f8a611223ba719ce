"""Operations that move tensors of known decompositions: results are where their outputs say."""

import itertools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite, movements_through
from distdl_rma.layers.ops.data_movement import (
    Concat,
    HaloExchange,
    StagedMove,
    all_gather,
    all_sum_reduce,
    broadcast,
    joined,
    reduce_scatter,
    repartition,
    sum_reduce,
)

mpi = pytest.mark.mpi
NEEDS, SHAPE, F64 = GradientNeeds(True, False), (7, 5), torch.float64


def site(P_world, name="it"):
    return CallSite(Machine.of(P_world), name)


def grid(P_world, *shape):
    return P_world.create_cartesian_topology_partition(shape)


def part(decomposition, whole):
    """This rank's part of a global tensor, in memory of its own."""
    return whole[decomposition.slices()].clone() if decomposition.partition.active else whole.new_empty(0)


def last(P_world):
    return P_world.create_partition_inclusive([P_world.size - 1])


# What each is made for, from rows and all ranks; how often an element of the input is in that of the output.
MOVES = {
    "repartition": lambda at, rows, P: (rows, repartition(at, rows, grid(P, 1, P.size), F64), 1),
    "gather": lambda at, rows, P: (rows, all_gather(at, rows, [0], F64), 1),
    "scatter": lambda at, rows, P: (
        source := Decomposition.balanced(rows.partition, SHAPE, replicate=[0]),
        reduce_scatter(at, source, [0], F64),
        P.size,
    ),
    "sum": lambda at, rows, P: (
        source := Decomposition.replicated(P, SHAPE),
        sum_reduce(at, source, P, last(P), F64),
        P.size,
    ),
    "sum on all": lambda at, rows, P: (
        source := Decomposition.replicated(P, SHAPE),
        all_sum_reduce(at, source, P, [0], F64),
        P.size,
    ),
    "copy": lambda at, rows, P: (
        source := Decomposition.replicated(last(P), SHAPE),
        broadcast(at, source, last(P), P, F64),
        1,
    ),
}


@mpi
@pytest.mark.parametrize("move", MOVES)
def test_results_are_where_their_decomposition_says_and_the_backward_is_the_adjoint(P_world, comm, move):
    rows = Decomposition.balanced(grid(P_world, comm.size, 1), SHAPE)
    source, operation, terms = MOVES[move](site(P_world, move), rows, P_world)
    whole = torch.arange(35.0, dtype=F64).reshape(SHAPE)
    x = part(source, whole).requires_grad_()
    y = operation(NEEDS, x)
    expected = terms * part(operation.output, whole)
    assert torch.equal(y, expected.reshape(y.shape))
    generator = torch.Generator().manual_seed(comm.rank)
    gradient = torch.randint(-9, 10, y.shape, generator=generator).double()
    y.backward(gradient)
    products = (float((a * b).detach().sum()) for a, b in ((y, gradient), (x, x.grad)))
    assert len(set(map(comm.allreduce, products))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("flips", list(itertools.product((False, True), repeat=2)))
def test_blocks_of_transposed_grids_are_where_the_output_says(P_world, comm, flips):
    n = comm.size // 2
    P = P_world.create_partition_inclusive(P_world.ranks[: 2 * n])
    P_half = P_world.create_partition_inclusive(P_world.ranks[:n])
    # Aligned, both grids are (n, 2) and (n, 1); of x the dimension that the n cuts is 0, or with a flip 1.
    P_few, P_many = (
        partition.create_cartesian_topology_partition(shape[::-1] if flip else shape)
        for partition, shape, flip in zip((P_half, P), ((n, 1), (n, 2)), flips, strict=True)
    )
    x = torch.arange(35.0).reshape(SHAPE)
    source = Decomposition.balanced(P_few, SHAPE)
    copy = broadcast(site(P_world, "copy"), source, P_few, P_many, x.dtype, flips)
    y = copy(NEEDS, part(source, x))
    assert copy.output.partition == P_many
    assert torch.equal(y, part(copy.output, x))
    back = sum_reduce(site(P_world, "sum"), copy.output, P_many, P_few, x.dtype, flips[::-1])
    assert [back.output.box(rank) for rank in P_few.ranks] == [source.box(rank) for rank in P_few.ranks]
    assert torch.equal(back(NEEDS, y), 2 * part(source, x))


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


@mpi
@pytest.mark.parametrize("keep_batch", [False, True])
def test_inputs_are_joined_where_the_output_says(P_world, comm, keep_batch):
    rows, channels = grid(P_world, comm.size, 1), grid(P_world, 1, comm.size)
    xs = torch.arange(15.0).reshape(5, 3), torch.arange(20).reshape(5, 4)
    sources = Decomposition.balanced(rows, (5, 3)), Decomposition.balanced(channels, (5, 4))
    operation = Concat(site(P_world), sources, [x.dtype for x in xs], rows, keep_batch)
    operation.connect()
    first, whole = part(sources[0], xs[0]).requires_grad_(), torch.cat(xs, 1)
    y = operation(GradientNeeds(True, False, (False,)), first, part(sources[1], xs[1]))
    assert torch.equal(y, part(operation.output, whole))
    y.backward(part(operation.output, whole))
    assert torch.equal(first.grad, first)


def test_what_torch_would_not_concatenate_is_refused():
    assert joined([(2, 3, 4), (2, 0, 4)], [torch.int8, torch.float32], 3) == ((2, 3, 4), torch.float32)
    floats, others = [torch.float32, torch.float32], [torch.float64, torch.float8_e5m2]
    for second, dtypes, words in (
        ((2, 3), floats, "input 1 has 2 dimensions"),
        ((1, 3, 4), floats, r"input 1 \(1, 3, 4\), which must agree in dimension 0"),
        ((2, 3, 4), others, r"input 0 is torch\.float64 but input 1 is torch\.float8_e5m2"),
    ):
        with pytest.raises(ShapeError, match=words):
            joined([(2, 3, 4), second], dtypes, 3)


@mpi
@pytest.mark.parametrize("mode", ["zeros", "constant", "reflect", "replicate", "circular"])
def test_a_block_and_what_is_around_it_is_cut_out_of_the_padded_tensor(P_world, comm, mode):
    x = torch.arange(1.0, 12.0).reshape(1, 1, 11)
    source = Decomposition.balanced(grid(P_world, 1, 1, comm.size), x.shape)
    operation = HaloExchange(site(P_world, mode), source, x.dtype, ((2, 1),), mode, 7.0)
    y = operation(GradientNeeds(False, False), part(source, x))
    constants = {"zeros": ("constant", 0.0), "constant": ("constant", 7.0)}
    padded = F.pad(x, (2, 1), *constants.get(mode, (mode,)))
    assert operation.output.shape == padded.shape
    assert torch.equal(y, part(operation.output, padded))
    start, stop = source.own_box.bounds[2]
    assert operation.output.own_box.bounds[2] == (start, stop + 3)

"""Subtensors copied to groups of ranks, and summed over them."""

import itertools

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.moves import all_sum_reduce, broadcast, sum_reduce

pytestmark = pytest.mark.mpi

NEEDS = GradientNeeds(True, False)


def mine(machine, root, x):
    """What the root has, and elsewhere a tensor without elements."""
    return x if machine.rank == root else x.new_empty(0)


def test_a_sum_and_a_broadcast_are_each_others_transpose(P_world, comm):
    machine, ranks = Machine.of(P_world), P_world.ranks
    root, P_root = ranks[-1], P_world.create_partition_inclusive([ranks[-1]])
    source = Decomposition.replicated(P_world, (2, 3))
    total = sum_reduce(CallSite(machine, "sum"), source, P_world, P_root, torch.float64)
    copy = broadcast(CallSite(machine, "copy"), total.output, P_root, P_world, torch.float64)
    assert total.output == Decomposition.replicated(P_root, (2, 3)) and copy.output == source
    terms = [torch.randint(-9, 9, (2, 3), generator=torch.Generator().manual_seed(r)).double() for r in ranks]
    x = terms[comm.rank].clone().requires_grad_()
    y = total(NEEDS, x)
    expected = sum(terms)
    assert torch.equal(y, mine(machine, root, expected).reshape(y.shape))
    y.backward(mine(machine, root, expected).reshape(y.shape))
    assert torch.equal(x.grad, expected)
    assert torch.equal(copy(NEEDS, mine(machine, root, expected)), expected)


def test_a_sum_on_all_ranks_is_its_own_transpose(P_world, comm):
    source = Decomposition.replicated(P_world, (4,))
    site = CallSite(Machine.of(P_world), "all")
    operation = all_sum_reduce(site, source, P_world, [0], torch.bfloat16)
    assert operation.output == source
    x = torch.full((4,), float(comm.rank + 1), dtype=torch.bfloat16, requires_grad=True)
    y = operation(NEEDS, x)
    assert torch.equal(y, torch.full_like(x, sum(range(comm.size + 1))))
    y.backward(x.detach())
    assert torch.equal(x.grad, y.detach())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("flips", list(itertools.product((False, True), repeat=2)))
def test_blocks_are_where_the_output_says(P_world, comm, flips):
    flip_x, flip_y = flips
    n = comm.size // 2
    P = P_world.create_partition_inclusive(P_world.ranks[: 2 * n])
    P_half = P_world.create_partition_inclusive(P_world.ranks[:n])

    def grid(partition, shape, flip):
        return partition.create_cartesian_topology_partition(shape[::-1] if flip else shape)

    # Aligned, both grids are (n, 2) and (n, 1); of x the dimension that the n cuts is 0, or with a flip 1.
    P_few, P_many = grid(P_half, (n, 1), flip_x), grid(P, (n, 2), flip_y)
    x = torch.arange(35.0).reshape(7, 5)
    source = Decomposition.balanced(P_few, x.shape)
    site = CallSite(Machine.of(P_world), "copy")
    copy = broadcast(site, source, P_few, P_many, x.dtype, flips)
    y = copy(NEEDS, x[source.slices()] if P_few.active else x.new_empty(0))
    assert copy.output.partition == P_many
    assert torch.equal(y, x[copy.output.slices()] if P_many.active else x.new_empty(0))
    back = sum_reduce(CallSite(site.machine, "sum"), copy.output, P_many, P_few, x.dtype, flips[::-1])
    assert [back.output.box(rank) for rank in P_few.ranks] == [source.box(rank) for rank in P_few.ranks]
    assert torch.equal(back(NEEDS, y), 2 * x[source.slices()] if P_few.active else x.new_empty(0))


def test_subtensors_of_any_shape_are_no_blocks(P_world, comm):
    shapes = {rank: (at,) for at, rank in enumerate(P_world.ranks)}
    operation = broadcast(CallSite(Machine.of(P_world), "it"), shapes, P_world, P_world, torch.float32)
    assert operation.output is None
    assert operation(NEEDS, torch.ones(comm.rank)).shape == (comm.rank,)


def test_subtensors_that_are_summed_are_equal_in_shape(P_world, comm):
    shapes = {rank: (2, 3) if at else (3, 2) for at, rank in enumerate(P_world.ranks)}
    if comm.size > 1:
        with pytest.raises(ShapeError, match=r"rank 0 passes \(3, 2\) but rank 1 \(2, 3\)"):
            all_sum_reduce(CallSite(Machine.of(P_world), "it"), shapes, P_world, [0], torch.float32)

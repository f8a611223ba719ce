"""Broadcast and sum-reduction: the printed examples, and what the sum-reduce document promises."""

import pytest
import torch

from distdl_rma import Machine, ShapeError, zero_volume_tensor
from distdl_rma.layers import AllGather, AllSumReduce, Broadcast, ReduceScatter, SumReduce
from tests.layers.partitioned.every_layer import first, grid
from tests.pretended import pretended_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def input_of(P_x, shape, dtype=torch.float64):
    """Integers that tell the ranks apart."""
    return torch.full(shape, 10.0 ** (P_x.rank or 0)).to(dtype) if P_x.active else zero_volume_tensor()


def total(ranks):
    return float(sum(10**rank for rank in ranks))


# Printed examples with extents of 2 at most: grids, transpositions, and what each rank of P_y sums.
FITTING = {
    "1": ((4,), (1,), False, False, [[0, 1, 2, 3]]),
    "2": ((2, 2), (1,), False, False, [[0, 1, 2, 3]]),
    "3": ((2, 2), (2, 1), False, False, [[0, 1], [2, 3]]),
    "4": ((2, 1, 2), (1, 1, 2), False, False, [[0, 2], [1, 3]]),
    "6, source transposed": ((1, 4), (4, 1), True, False, [[0], [1], [2], [3]]),
    "6, destination transposed": ((1, 4), (4, 1), False, True, [[0], [1], [2], [3]]),
    "7": ((2, 2), (1, 2), True, False, [[0, 1], [2, 3]]),
    "8": ((2, 2), (2, 1), False, True, [[0, 2], [1, 3]]),
}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("example", FITTING.values(), ids=FITTING)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)], ids=str)
def test_printed_example(P_world, example, shape):
    x_grid, y_grid, src, dest, sums = example
    P_x = grid(P_world, x_grid, range(4))
    P_y = grid(P_world, y_grid, reversed(range(4 - len(sums), 4)))
    y = SumReduce(P_x, P_y, transpose_src=src, transpose_dest=dest)(input_of(P_x, shape))
    if P_y.active:
        assert torch.equal(y, torch.full(shape, total(sums[P_y.rank]), dtype=torch.float64))
    copy = Broadcast(P_y, P_x, transpose_src=dest, transpose_dest=src)(input_of(P_y, shape))
    root = next(at for at, group in enumerate(sums) if P_x.rank in group)
    assert torch.equal(copy, torch.full(shape, total([root]), dtype=torch.float64))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layer", [SumReduce, AllSumReduce])
def test_subtensors_that_differ_in_shape_are_refused_on_all_ranks(P_world, comm, layer):
    to = first(P_world, 1) if layer is SumReduce else 0
    reduce, odd = layer(P_world, to, name="sum"), comm.rank == 1
    with pytest.raises(ShapeError, match=r"'sum': .*rank 0 passes \(2, 3\) but rank 1 \(3, 2\)"):
        reduce(torch.ones(3, 2) if odd else torch.ones(2, 3))
    with pytest.raises(ShapeError, match=r"rank 0 passes torch.float32 but rank 1 torch.int64"):
        reduce(torch.ones(2, 3, dtype=torch.int64 if odd else torch.float32))


def test_all_sum_reduce_is_bitwise_alike_on_all_ranks_and_from_run_to_run(P_world, comm):
    torch.manual_seed(comm.rank)
    x = torch.randn(5000, dtype=torch.float64).exp()
    bits = [AllSumReduce(P_world, axes_reduce=[0])(x).numpy().tobytes() for _ in range(3)]
    assert len({*comm.allgather(bits[0]), *bits}) == 1


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("pretend", [False, True], ids=["one node", "two nodes"])
def test_short_types_are_rounded_once(P_world, comm, pretend):
    # 256 + 1 is no bfloat16; three terms in float32 and one rounding are.
    terms = [256.0, 1.0, 1.0, 2.0][: comm.size]
    nodes = ((0, 1), tuple(range(2, comm.size))) if pretend else (tuple(range(comm.size)),)
    x = torch.tensor(terms[comm.rank], dtype=torch.bfloat16, requires_grad=True)
    expected = torch.tensor(sum(terms)).bfloat16()
    with pretended_nodes(Machine.of(P_world), nodes):
        y = SumReduce(P_world, first(P_world, 1))(x)
        assert comm.rank or torch.equal(y, expected)
        assert torch.equal(AllSumReduce(P_world, 0)(x), expected)
        root = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
        copy = Broadcast(first(P_world, 1), P_world)(root if comm.rank == 0 else root[None][:0])
        copy.backward(x.detach())
        parts = x.detach().expand(comm.size)
        own = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        AllGather(P_world, 0)(own).backward(parts)
        assert torch.equal(own.grad, expected[None])
        assert torch.equal(ReduceScatter(P_world, 0)(parts.clone()), expected[None])
    assert comm.rank or torch.equal(root.grad, expected)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_sums_of_integers_wrap_around(P_world, comm, name):
    dtype = getattr(torch, name)
    largest, bits = torch.iinfo(dtype).max, torch.iinfo(dtype).bits
    x = torch.tensor([-1 if name == "uint64" else largest, 1, 0]).to(dtype)
    y = AllSumReduce(P_world, axes_reduce=0)(x)
    assert y.dtype == dtype
    assert [value % 2**bits for value in y.tolist()] == [comm.size * largest % 2**bits, comm.size, 0]

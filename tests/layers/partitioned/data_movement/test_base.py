"""What all layers that move data have in common, and a random search over their arguments."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distdl_rma import UnsupportedError, zero_volume_tensor
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers import (
    AllGather,
    AllSumReduce,
    Broadcast,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from distdl_rma.layers.partitioned.data_movement import chosen_axes
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.layers.partitioned.random_shards import cut_balanced

pytestmark = pytest.mark.mpi


def grid(P_world, *shape):
    return P_world.create_cartesian_topology_partition(shape)


def on(P_world, ranks, shape):
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def first(P_world):
    return on(P_world, [0], (1, 1, 1))


LAYERS = {
    "Repartition": lambda P: Repartition(grid(P, 1, 1, P.size), grid(P, P.size, 1, 1), name="it"),
    "Broadcast": lambda P: Broadcast(first(P), grid(P, 1, 1, P.size), name="it"),
    "SumReduce": lambda P: SumReduce(grid(P, 1, 1, P.size), first(P), name="it"),
    "AllSumReduce": lambda P: AllSumReduce(grid(P, 1, 1, P.size), axes_reduce=2, name="it"),
    "AllGather": lambda P: AllGather(grid(P, 1, 1, P.size), axes_all_gather=2, name="it"),
    "ReduceScatter": lambda P: ReduceScatter(grid(P, 1, 1, P.size), axes_reduce_scatter=2, name="it"),
    "HaloExchange": lambda P: HaloExchange(grid(P, 1, 1, P.size), 1, "circular", name="it"),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def input_of(layer, rows=2, dtype=torch.float64):
    """Random integers where the layer takes its input."""
    if not layer.P_x.active:
        return zero_volume_tensor(rows, dtype)
    torch.manual_seed(layer.P_x.me)
    return torch.randint(-9, 9, (rows, 3, 4)).to(dtype)


@each_layer
def test_gradients_accumulate_over_calls_in_any_order_and_recomputed_ones(P_world, make):
    layer = make(P_world)
    x = input_of(layer).requires_grad_()
    layer(x).square().sum().backward()
    once, x.grad = x.grad, None
    two = [layer(x).square().sum() for _ in range(2)]
    two[1].backward(retain_graph=True)
    two[0].backward()
    assert torch.equal(x.grad, 2 * once)
    two[1].backward()
    assert torch.equal(x.grad, 3 * once)
    again = checkpoint(layer, x, use_reentrant=False)
    (again.square().sum() + layer(x).square().sum()).backward()
    assert torch.equal(x.grad, 5 * once)


@each_layer
def test_a_connected_layer_shakes_no_hands_in_the_first_call(P_world, comm, monkeypatch, make):
    layer = make(P_world)
    cut = isinstance(layer, Repartition | AllGather | HaloExchange)
    layer.connect((2, 3, 4 * comm.size if cut else 4), torch.float64)

    def exchange(*_arguments, **_named):
        raise AssertionError("a handshake")

    monkeypatch.setattr(SegmentBuffer, "exchange", exchange)
    x = input_of(layer).requires_grad_()
    layer(x).sum().backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("passed", [torch.float32, torch.complex128, torch.bool], ids=str)
def test_what_has_no_elements_may_be_of_any_type(P_world, comm, dtype, passed):
    layer = Broadcast(first(P_world), grid(P_world, 1, 1, comm.size))
    call_arguments = comm.rank > 0 and passed != torch.bool
    smooth = dtype.is_floating_point or dtype.is_complex
    x = zero_volume_tensor(3, passed, call_arguments)
    if comm.rank == 0:
        x = torch.ones(2, dtype=dtype, requires_grad=smooth)
    y = layer(x)
    assert torch.equal(y, torch.ones(2, dtype=dtype))
    assert y.requires_grad == smooth
    if smooth:
        y.backward(torch.ones_like(y))
        assert comm.rank or torch.equal(x.grad, torch.full((2,), comm.size, dtype=dtype))
        assert not call_arguments or (x.grad.shape, x.grad.dtype) == ((3, 0), passed)


@each_layer
def test_second_derivatives_are_refused(P_world, make):
    layer = make(P_world)
    x = input_of(layer).requires_grad_()
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_axes_are_sorted_and_may_be_those_that_are_kept():
    P = Partition(tuple(range(8)), (2, 2, 2), 0)
    assert chosen_axes("it", P, "axes", (-1, 0), None) == chosen_axes("it", P, "axes", None, 1) == (0, 2)


def test_views_that_are_lazily_conjugate_or_negative_move_as_what_they_mean(P_world):
    n = P_world.size
    for P_x, P_y in (
        (grid(P_world, n, 1), grid(P_world, 1, n)),
        (grid(P_world, 1, n), on(P_world, [n - 1], (1, 1))),
        (on(P_world, [0], (1, 1)), grid(P_world, n, 1)),
        (on(P_world, reversed(range(n)), (n, 1)), grid(P_world, n, 1)),
    ):
        z = torch.complex(torch.arange(35.0), torch.arange(35.0) + 1).reshape(7, 5)
        local = cut_balanced(P_x, z)
        for of in (torch.conj, lambda t: t.conj().imag):
            y = Repartition(P_x, P_y, preserve_batch=False)(of(local))
            assert torch.equal(y, cut_balanced(P_y, of(z)))

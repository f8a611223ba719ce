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
from tests.layers.partitioned.every_layer import first, grid

pytestmark = pytest.mark.mpi


# By a partition of all ranks in the last dimension, of the first alone, and of all in the first dimension.
LAYERS = {
    "Repartition": lambda P, _, Q: Repartition(P, Q),
    "Broadcast": lambda P, root, _: Broadcast(root, P),
    "SumReduce": lambda P, root, _: SumReduce(P, root),
    "AllSumReduce": lambda P, *_: AllSumReduce(P, axes_reduce=2),
    "AllGather": lambda P, *_: AllGather(P, axes_all_gather=2),
    "ReduceScatter": lambda P, *_: ReduceScatter(P, axes_reduce_scatter=2),
    "HaloExchange": lambda P, *_: HaloExchange(P, 1, "circular"),
}


@pytest.fixture(params=LAYERS)
def layer(request, P_world):
    n = P_world.size
    return LAYERS[request.param](grid(P_world, (1, 1, n)), first(P_world, 3), grid(P_world, (n, 1, 1)))


def input_of(layer, rows=2, dtype=torch.float64):
    """Random integers where the layer takes its input."""
    if not layer.P_x.active:
        return zero_volume_tensor(rows, dtype)
    torch.manual_seed(layer.P_x.me)
    return torch.randint(-9, 9, (rows, 3, 4)).to(dtype)


def test_gradients_accumulate_over_calls_in_any_order_and_recomputed_ones(layer):
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


def test_a_connected_layer_shakes_no_hands_in_the_first_call(comm, monkeypatch, layer):
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
    layer = Broadcast(first(P_world, 3), grid(P_world, (1, 1, comm.size)))
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


def test_second_derivatives_are_refused(layer):
    x = input_of(layer).requires_grad_()
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_axes_are_sorted_and_may_be_those_that_are_kept():
    P = Partition(tuple(range(8)), (2, 2, 2), 0)
    assert chosen_axes("it", P, "axes", (-1, 0), None) == chosen_axes("it", P, "axes", None, 1) == (0, 2)

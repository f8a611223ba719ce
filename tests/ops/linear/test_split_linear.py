"""The operator of linear layers, called with tensors of known decompositions and without a layer."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.linear import LinearGrid, SplitLinear

pytestmark = pytest.mark.mpi
F64 = {"dtype": torch.float64}
EVERYTHING = GradientNeeds(True, True)


def part(decomposition, whole):
    return whole[decomposition.slices()] if decomposition.partition.active else whole.new_empty(0)


@pytest.mark.parametrize("cuts", ["blocks", "rows", "columns"])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_product(P_world, comm, cuts, bias):
    shape = [comm.size if cuts == each else 1 for each in ("blocks", "rows", "columns")]
    grid = LinearGrid(P_world.create_cartesian_topology_partition(shape), 5, 3)
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    torch.manual_seed(0)
    whole = {"weight": torch.randn(3, 5, **F64)} | ({"bias": torch.randn(3, **F64)} if bias else {})
    x, d_y = torch.randn(7, 5, **F64), torch.randn(7, 3, **F64)
    source = Decomposition.balanced(P_x, x.shape)
    operation = SplitLinear(
        CallSite(Machine.of(P_world), "product"), source, grid, P_world_rows(P_world), torch.float64
    )
    blocks = {"weight": grid.weight, "bias": grid.bias}
    mine = {key: part(blocks[key], value).clone().requires_grad_() for key, value in whole.items()}
    local = part(source, x).clone().requires_grad_()
    for value in (x, *whole.values()):
        value.requires_grad_()
    y = F.linear(x, **whole)
    y.backward(d_y)
    for _ in range(2):
        out = operation(EVERYTHING, local, **mine)
        torch.testing.assert_close(out, part(operation.output, y))
        local.grad = None
        out.backward(part(operation.output, d_y))
        torch.testing.assert_close(local.grad, part(source, x.grad))
    if cuts != "blocks":
        for key, value in mine.items():
            if value.grad is not None:
                torch.testing.assert_close(value.grad / 2, part(blocks[key], whole[key].grad))


def P_world_rows(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((P_world.size, 1))


def test_features_that_do_not_fit_are_refused_before_anything_moves(P_world):
    grid = LinearGrid(P_world.create_cartesian_topology_partition((P_world.size, 1, 1)), 5, 3)
    rows = P_world_rows(P_world)
    source = Decomposition.balanced(rows, (7, 4))
    with pytest.raises(ShapeError, match=r"global input \(7, 4\) has 4 features, the layer takes 5"):
        SplitLinear(CallSite(Machine.of(P_world), "product"), source, grid, rows, torch.float64)


def test_gradients_of_leaves_go_to_the_places_that_are_offered(P_world, comm):
    grid = LinearGrid(P_world.create_cartesian_topology_partition((comm.size, 1, 1)), 5, 3)
    rows = P_world_rows(P_world)
    place, source = torch.zeros(3, 5, **F64), Decomposition.balanced(rows, (comm.size, 5))
    operation = SplitLinear(
        CallSite(Machine.of(P_world), "product"),
        source,
        grid,
        rows,
        torch.float64,
        lambda: lambda _: place.view(3, 5),
    )
    weight, x = torch.ones(3, 5, **F64, requires_grad=True), torch.ones(1, 5, **F64)
    operation(EVERYTHING, x, weight=weight).sum().backward()
    assert weight.grad.data_ptr() == place.data_ptr() and (place == 1).all()
    weight.grad = None
    place.zero_()
    operation(EVERYTHING, x, weight=2 * weight).sum().backward()
    assert (place == 0).all(), "of what was computed from a parameter nothing is written"

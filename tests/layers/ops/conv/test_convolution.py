"""The operator of convolutions, called with tensors of known decompositions and without a layer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry import Decomposition, Stencil
from distdl_rma.layers.ops.conv import pieces
from distdl_rma.layers.ops.conv.convolution import Convolution, convolve
from distdl_rma.layers.ops.conv.worker_grid import OUT, ConvolutionOptions, WorkerGrid, can_overlap
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite
from tests.layers.partitioned.sequential import agree

NEEDS = GradientNeeds(True, True)
SHAPE, WEIGHT = (2, 4, 7, 6), (6, 4, 3, 3)
STENCIL = Stencil.of((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
# Of what overlaps: grids of input, output and work (batch, out-channel, in-channel, *space), and the groups.
FORMS = {
    "feature": lambda n: ((1, 1, n, 1), (1, 1, n, 1), (1, 1, 1, n, 1), 1),
    "other ranks in space": lambda n: ((1, 1, n, 1), (1, 1, 1, n), (1, 1, 1, 1, n), 1),
    "batch": lambda n: ((1, 1, 1, n), (n, 1, 1, 1), (n, 1, 1, 1, 1), 1),
    "in-channels": lambda n: ((1, n, 1, 1), (1, 1, n, 1), (1, 1, n, 1, 1), 1),
    "out-channels": lambda n: ((1, 1, n, 1), (1, n, 1, 1), (1, n, 1, 1, 1), 1),
    "groups": lambda n: ((1, 1, n, 1), (1, 1, 1, n), (1, 1, 1, n, 1), 2),
}
each_form = pytest.mark.parametrize("form", FORMS)


def whole_tensors(groups):
    """Input, weight and bias with gradients."""
    torch.manual_seed(0)
    shapes = SHAPE, (WEIGHT[0], WEIGHT[1] // groups, *WEIGHT[2:]), (WEIGHT[0],)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def made(P_world, form, name, joins=False):
    """An operation, and who has which part of the input."""
    first, second, work, groups = FORMS[form](P_world.size)
    P_x, P_y, grid = (P_world.create_cartesian_topology_partition(shape) for shape in (first, second, work))
    workers = WorkerGrid(grid, OUT, groups, (WEIGHT[0], WEIGHT[1] // groups, *WEIGHT[2:]))
    source = Decomposition.balanced(P_x, SHAPE)
    overlaps = can_overlap(STENCIL, "zeros", workers, P_x)
    options = ConvolutionOptions(STENCIL, workers, overlaps=overlaps, joins=joins)
    site = CallSite(Machine.of(P_world), name)
    return Convolution(site, options, source, P_y, torch.float64), source, workers


def of_rows(P_world):
    """Ranks in a row that cut the rows of inputs and outputs, as partition and as workers."""
    shapes = (1, 1, P_world.size, 1), (1, 1, 1, P_world.size, 1)
    P_x, grid = map(P_world.create_cartesian_topology_partition, shapes)
    return P_x, WorkerGrid(grid, OUT, 1, WEIGHT)


def part(decomposition, whole):
    return whole.detach()[decomposition.slices()].clone()


@pytest.mark.mpi
def test_large_blocks_have_the_gradients_of_torch(P_world, comm, monkeypatch):
    # Blocks of 8640 bytes.
    numbers = {"_LARGE_NBYTES": 8 << 10, "_PIECE_NBYTES": 4 << 10, "_PIECE_ELEMENTS": 1, "_KEPT_NBYTES": 0}
    for name, number in numbers.items():
        monkeypatch.setattr(pieces, name, number)
    P_x, workers = of_rows(P_world)
    torch.manual_seed(0)
    shapes = (1, 4, 60 * P_world.size, 3), WEIGHT
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    source = Decomposition.balanced(P_x, x.shape)
    options = ConvolutionOptions(STENCIL, workers, on_workers=True)
    operation = Convolution(CallSite(Machine.of(P_world), "large"), options, source, P_x, torch.float64)
    assert len(operation.core.of_data) == 2
    y = F.conv2d(x, weight, padding=1)
    d_y = torch.randn_like(y)
    y.backward(d_y)
    local, mine = part(source, x).requires_grad_(), weight.detach().clone().requires_grad_()
    operation(NEEDS, local, weight=mine).backward(part(operation.output, d_y))
    agree(local.grad, part(source, x.grad), "input gradient")
    total = torch.from_numpy(sum(comm.allgather(mine.grad.numpy())))
    agree(total, weight.grad, "weight gradient")
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", 1 << 10)
    whole = Convolution(CallSite(Machine.of(P_world), "whole"), options, source, P_x, torch.float64)
    assert not whole.core.of_data, "pieces that torch would leave to slower kernels"


@pytest.mark.mpi
@each_form
@pytest.mark.parametrize("joins", [False, True])
def test_gradients_of_weights_are_filled_where_they_are_wanted(P_world, comm, form, joins):
    operation, source, workers = made(P_world, form, f"{form} {joins}", joins)
    x, weight, bias = whole_tensors(workers.groups)
    places = {"weight": torch.full_like(weight, torch.nan), "bias": torch.full_like(bias, torch.nan)}
    asked = []

    def fill(key, gradient):
        asked.append(key)
        return places[key].detach().copy_(gradient)

    weights = {"weight": weight, "bias": bias}
    agreed = SimpleNamespace(guess=operation, settle=lambda: (operation, NEEDS))
    y, needs = convolve(agreed, True, part(source, x), weights, fill)
    assert needs is NEEDS
    y.sum().backward()
    assert sorted(asked) == ["bias", "weight"]
    torch.testing.assert_close(places["weight"], weight.grad)
    torch.testing.assert_close(places["bias"], bias.grad)
    assert weight.grad.data_ptr() == places["weight"].data_ptr(), "no copy"


class Late:
    """An agreement that guesses one operation, and settles for another."""

    def __init__(self, guess, holds):
        self.guess, self.holds = guess, holds

    def settle(self):
        if self.guess is not None:
            self.guess.void()
        return self.holds, NEEDS


@pytest.mark.mpi
def test_a_wrong_guess_costs_a_start_and_changes_nothing(P_world, comm):
    first, source, _ = made(P_world, "feature", "first")
    second, _, _ = made(P_world, "feature", "second")
    x, weight, bias = whole_tensors(1)
    local, weights = part(source, x), {"weight": weight, "bias": bias}
    first(NEEDS, local, **weights)
    expected = second(NEEDS, local, **weights)
    # Only some ranks see a reason to guess.
    y, _ = convolve(Late(first, second), True, local, weights)
    assert torch.equal(y, expected)
    assert torch.equal(first(NEEDS, local, **weights), expected)


@pytest.mark.mpi
def test_an_input_that_does_not_fit_is_refused_before_anything_moves(P_world):
    P_x, workers = of_rows(P_world)
    site, options = CallSite(Machine.of(P_world), "refused"), ConvolutionOptions(STENCIL, workers)
    for shape, message in (
        ((2, 3, 7, 6), "input has 3 channels, the layer takes 4"),
        ((2, 4, 0, 6), "no elements in space"),
    ):
        with pytest.raises(ShapeError, match=message):
            Convolution(site, options, Decomposition.balanced(P_x, shape), P_x, torch.float64)

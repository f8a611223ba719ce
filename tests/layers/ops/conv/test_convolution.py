"""The operator of convolutions, called with tensors of known decompositions and without a layer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError, shard
from distdl_rma.geometry import Decomposition, Stencil
from distdl_rma.layers.ops.conv import convolution, pieces
from distdl_rma.layers.ops.conv.convolution import Convolution, convolve
from distdl_rma.layers.ops.conv.worker_grid import OUT, ConvolutionOptions, WorkerGrid, can_overlap
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.split import SplitTensor
from tests.layers.partitioned.sequential import agree

NEEDS = GradientNeeds(True, True)
SHAPE, WEIGHT = (2, 4, 7, 6), (6, 4, 3, 3)
STENCIL = Stencil.of((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
# Grids of input, output and work (batch, out-channel, in-channel, *space), and the groups.
FORMS = {
    "feature": lambda n: ((1, 1, n, 1), (1, 1, n, 1), (1, 1, 1, n, 1), 1),
    "other ranks in space": lambda n: ((1, 1, n, 1), (1, 1, 1, n), (1, 1, 1, 1, n), 1),
    "batch": lambda n: ((1, 1, 1, n), (n, 1, 1, 1), (n, 1, 1, 1, 1), 1),
    "in-channels": lambda n: ((1, n, 1, 1), (1, 1, n, 1), (1, 1, n, 1, 1), 1),
    "out-channels": lambda n: ((1, 1, n, 1), (1, n, 1, 1), (1, n, 1, 1, 1), 1),
    "groups": lambda n: ((1, 1, n, 1), (1, 1, 1, n), (1, 1, 1, n, 1), 2),
    "cut groups": lambda n: ((1, n, 1, 1), (1, 1, n, 1), (1, n, 1, 1, 1), 2),
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
@each_form
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kept", ["blocks", "whole"])
def test_outputs_and_gradients_are_those_of_torch(P_world, comm, form, kept, joins):
    operation, source, workers = made(P_world, form, f"{form} {kept} {joins}", joins)
    x, weight, bias = whole_tensors(workers.groups)
    y = F.conv2d(x, weight, bias, padding=1, groups=workers.groups)
    d_y = torch.randn_like(y)
    y.backward(d_y)
    blocks, local = workers.blocks(), part(source, x).requires_grad_()
    adds = workers.bias(len(bias)).partition.active
    mine = {"weight": part(blocks, weight) if kept == "blocks" else weight.detach().clone()}
    if kept == "whole" and adds:
        mine["bias"] = bias.detach().clone()
    elif kept == "blocks":
        mine["bias"] = part(workers.bias(len(bias)), bias) if adds else bias.new_empty(0).detach()
    for value in mine.values():
        value.requires_grad_()
    for _ in range(2):
        local.grad = None
        out = operation(NEEDS, local, **mine)
        agree(out, part(operation.output, y), "output")
        out.backward(part(operation.output, d_y))
        agree(local.grad, part(source, x.grad), "input gradient")
    if form == "out-channels":
        cut = weight.grad[blocks.slices()]
        found = mine["weight"].grad if kept == "blocks" else mine["weight"].grad[blocks.slices()]
        agree(found / 2, cut, "weight gradient")
        assert mine["weight"].grad.count_nonzero() == cut.numel(), "nothing beyond this rank's block"
    else:
        total = torch.from_numpy(sum(comm.allgather(whole_gradient(mine["weight"], blocks, weight).numpy())))
        agree(total / 2, weight.grad, "weight gradient")


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


def whole_gradient(mine, blocks, weight):
    """A rank's weight gradient in the shape of the whole weight."""
    found = torch.zeros_like(weight)
    if mine.shape == weight.shape:
        return found + mine.grad
    found[blocks.slices()] = mine.grad
    return found.detach()


@pytest.mark.mpi
@each_form
@pytest.mark.parametrize("joins", [False, True])
def test_gradients_of_weights_are_filled_where_they_are_wanted(P_world, comm, form, joins):
    operation, source, workers = made(P_world, form, f"{form} {joins}", joins)
    if not operation.overlaps:
        pytest.skip("torch's autograd makes the gradients of what is gathered")
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


JOINED = {
    "rows": ((0, 1), (1, 2, 12, 9), (3, 3), {"padding": 1}),
    "columns": ((1, 0), (2, 2, 9, 12), (3, 3), {"padding": 1}),
    "dilated": ((0, 1), (1, 2, 17, 8), (3, 2), {"padding": (2, 0), "dilation": (2, 1)}),
    "jumps": ((0, 1), (1, 2, 13, 9), (3, 3), {"padding": 1, "stride": 2}),
    "of groups": ((0, 1), (1, 4, 12, 9), (5, 3), {"padding": (2, 1), "groups": 2}),
    "less than a window each": ((0, 1), (1, 2, 3, 9), (3, 3), {"padding": 1}),
}


@pytest.mark.mpi
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("case", JOINED)
def test_convolutions_of_own_data_and_halo_in_one_tensor_are_those_of_torch(P_world, monkeypatch, case, kept):
    # The tensor is saved for the backward, or made again from the halo.
    monkeypatch.setattr(convolution, "SMALLEST_NBYTES", 1 << 18 if kept else 0)
    axes, shape, kernel, how = JOINED[case]
    machine = Machine.of(P_world)
    P_x = machine.partition((1, 1, *(machine.size if axis else 1 for axis in reversed(axes))))
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, shape[1] // how.get("groups", 1), *kernel, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    twins = [w.clone().requires_grad_() for w in (weight, bias)]
    expected = F.conv2d(x, *twins, **how)
    expected.square().sum().backward()
    cut = shard(P_x, x.detach())
    block = cut.to_local().clone().requires_grad_()
    for parameter in (weight, bias):
        parameter.requires_grad_()
    y = F.conv2d(SplitTensor(block, cut.decomposition), weight, bias, **how)
    y.square().sum().backward()
    exactly = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(y.full_tensor(), expected, **exactly)
    torch.testing.assert_close(block.grad, shard(P_x, x.grad).to_local(), **exactly)
    for mine, theirs in zip((weight, bias), twins, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **exactly)

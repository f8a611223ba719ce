"""Compiled models of one function each, on torch's samples: equal, bit by bit, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distdl_rma import Partition, UnsupportedError, distribute
from distdl_rma.layers.split import SplitTensor
from distdl_rma.testing import block, grids
from tests.fuzz.samples import operations
from tests.layers.model.test_compile import alike
from tests.layers.split.samples import EXCLUDED, WITHOUT_GRADIENT, _samples, forms_of

# One of so many samples of a function is tried, the first one of each function in turn.
PARTS, CALLS, EACH = 12, 3, 3


class Function(nn.Module):
    """A function of a learned multiple of a tensor."""

    def __init__(self):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.tensor(0.75, dtype=torch.float64)), None

    def forward(self, x, *rest):
        return self.function(x * self.weight if x.is_floating_point() or x.is_complex() else x, *rest)


def function_of(op, leaves, spec, places, at):
    """A form of the function, of the tensors among the arguments of a sample."""
    forms = forms_of(op)
    call = forms[at % len(forms)]

    def function(*tensors):
        given = dict(zip(places, tensors, strict=True))
        args, kwargs = tree_unflatten([given.get(place, x) for place, x in enumerate(leaves)], spec)
        return call(args[0].clone() if call is op.inplace_variant else args[0], *args[1:], **kwargs)

    return function


def outcome(model, call, x, rest, seed):
    """Results of a call, gradients of a loss of them, and the state of random numbers behind it."""
    torch.manual_seed(seed)
    model.weight.grad, loss = None, 0
    results = [y for y in tree_flatten(call(x, *rest))[0] if isinstance(y, torch.Tensor)]
    for y in (y for y in results if y.requires_grad):
        parts = torch.view_as_real(y) if y.is_complex() else y
        loss = loss + (parts * 0.5 + 0.25 * parts * parts).sum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    blocks = [y._local.detach() if isinstance(y, SplitTensor) else y.detach() for y in results]
    gradient = None if x.grad is None else x.grad.to_local()
    # Gradients are in memory that the next sum uses again.
    found = *blocks, gradient, model.weight.grad, torch.get_rng_state()
    return [None if y is None else y.clone() for y in found]


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.in_turn(2, 3)
@pytest.mark.parametrize("part", range(PARTS))
def test_samples(P_world, part):
    model = distribute(Function(), {"H": -1})
    model.compile("replay")
    compiled, equal, refused = model._compiled_call_impl, 0, 0
    for which, op in enumerate([op for op in operations() if op.name not in EXCLUDED][part::PARTS]):
        some = MPI.COMM_WORLD.bcast([*_samples(op)] if MPI.COMM_WORLD.rank == 0 else None)
        for at, (given, _) in [*enumerate(some)][which % min(EACH, len(some) or 1) :: EACH]:
            leaves, spec = tree_flatten(given)
            places = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            first, *rest = (leaves[place].detach() for place in places)
            needs = leaves[places[0]].requires_grad and op.name not in WITHOUT_GRADIENT
            every = [*grids(first.dim(), P_world.size)]
            grid = every[at % len(every)]
            if not isinstance(grid, Partition):
                grid = P_world.create_cartesian_topology_partition(grid)
            model.function = function_of(op, leaves, spec, places, at)
            compiled.kinds.clear()

            def outcomes(call, first=first, rest=rest, needs=needs, grid=grid):
                for n in range(CALLS):
                    x = first * (1 - n / 8) if first.is_floating_point() or first.is_complex() else first
                    x = block(grid, x.clone()).detach().requires_grad_(needs)
                    yield outcome(model, call, x, rest, n)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    true = [*outcomes(model._call_impl)]
                except Exception:
                    # Refused by the rule, or of another form.
                    continue
                try:
                    found = [*outcomes(model)]
                except UnsupportedError:
                    refused += 1
                    continue
            assert all(map(alike, true, found)), f"{op.name}: sample {at} on {grid}"
            assert [kind.known for kind in compiled.kinds] == [True], op.name
            equal += 1
    model.distributed.close()
    assert equal > 3 * refused

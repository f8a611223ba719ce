"""DTensor on our group: distribute, redistribute, products, and layers parallel in columns and rows."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.torch_backend.backends import results

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]
PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def draw(*shape):
    torch.manual_seed(7)
    return torch.randn(shape, dtype=torch.float64)


def test_redistribute_from_each_placement_to_each(comm):
    def program():
        mesh, whole, found = line(), draw(7, 5), []
        for before, after in itertools.product(PLACEMENTS, PLACEMENTS):
            x = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            expected = distribute_tensor(whole, mesh, [after], src_data_rank=None)
            torch.testing.assert_close(x.to_local(), expected.to_local(), rtol=0, atol=0)
            found.append(x.full_tensor())
        return found

    for found in results(comm, program):
        torch.testing.assert_close(found, draw(7, 5), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min"])
def test_partial_results_are_reduced(comm, kind):
    def program():
        mine = DTensor.from_local(draw(7, 5) * (dist.get_rank() + 1), line(), [Partial(kind)])
        return [mine.redistribute(placements=[after]).full_tensor() for after in PLACEMENTS]

    everyone = torch.stack([draw(7, 5) * (rank + 1) for rank in range(comm.size)])
    expected = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}[kind](everyone, 0)
    for found in results(comm, program):
        torch.testing.assert_close(found, expected)


def test_products_and_their_gradients(comm):
    a, b = draw(7, 5).requires_grad_(), draw(5, 6).requires_grad_()
    (a @ b).square().sum().backward()

    def program():
        mesh, found = line(), []
        for first, second in itertools.product(PLACEMENTS, PLACEMENTS):
            x = distribute_tensor(draw(7, 5), mesh, [first]).requires_grad_()
            y = distribute_tensor(draw(5, 6), mesh, [second]).requires_grad_()
            product = x @ y
            product.square().sum().backward()
            found.append([each.full_tensor().detach() for each in (product, x.grad, y.grad)])
        return found

    for found in results(comm, program):
        torch.testing.assert_close(found, [(a @ b).detach(), a.grad, b.grad])


def test_layers_parallel_in_columns_and_rows(comm):
    def network():
        torch.manual_seed(8)
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()

    def program():
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
        model = parallelize_module(network(), line(), plan)
        y = model(draw(2, 12, 8).chunk(comm.size, dim=1)[comm.rank])
        y.square().sum().backward()
        gradients = [weight.grad.full_tensor() for weight in model.parameters()]
        return y.detach(), gradients

    model = network()
    y = model(draw(2, 12, 8))
    y.square().sum().backward()
    torch.testing.assert_close(
        results(comm, program), (y.detach(), [weight.grad for weight in model.parameters()])
    )


@pytest.mark.sizes(4)
@pytest.mark.mpi(min_size=4)
def test_a_mesh_of_two_axes(comm):
    def program():
        mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
        for pair in itertools.product(PLACEMENTS, PLACEMENTS):
            x = distribute_tensor(draw(7, 5), mesh, pair)
            found += [
                x.full_tensor(),
                x.redistribute(placements=pair[::-1]).full_tensor(),
                x.sum().full_tensor(),
            ]
        return found

    for number, found in enumerate(results(comm, program)):
        torch.testing.assert_close(found, draw(7, 5).sum() if number % 3 == 2 else draw(7, 5))

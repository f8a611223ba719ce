"""Differentiable collectives and functional collectives on our group, against gloo's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.torch_backend.backends import differentiable, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def values(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(shape, dtype=dtype, generator=generator)


def gradient(make):
    """A result of a collective, and the gradient of a sum over its parts that are weighted differently."""
    x = values(dist.get_world_size(), 3).requires_grad_()
    y = make(x)
    parts = y if isinstance(y, tuple | list) else [y]
    weights = torch.arange(1.0, 4.0, dtype=torch.float64) * (dist.get_rank() + 1)
    sum(((number + 1) * part * weights).sum() for number, part in enumerate(parts)).backward()
    return [part.detach() for part in parts], x.grad


DIFFERENTIABLE = {
    "all_reduce": differentiable.all_reduce,
    "all_reduce of maxima": lambda x: differentiable.all_reduce(x * 1, op=dist.ReduceOp.MAX),
    # What the others have afterwards is not said.
    "reduce": lambda x: differentiable.reduce(x * 1, dst=0) * (dist.get_rank() == 0),
    "broadcast": lambda x: differentiable.broadcast(x * 1, src=dist.get_world_size() - 1),
    "all_gather": differentiable.all_gather,
    "gather": lambda x: differentiable.gather(x, dst=0),
    "scatter": lambda x: differentiable.scatter(list(x.unbind()), src=0),
    "reduce_scatter": lambda x: differentiable.reduce_scatter(x.new_empty(3), list(x.unbind())),
    "all_to_all": lambda x: differentiable.all_to_all(
        [torch.empty_like(each) for each in x], list(x.unbind())
    ),
    "all_to_all_single": lambda x: differentiable.all_to_all_single(torch.empty_like(x), x),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_collectives(comm, name):
    same_on_both(comm, lambda: gradient(DIFFERENTIABLE[name]))


# Their arguments before the group; x has a row for each rank.
FUNCTIONAL = {
    "all_reduce": lambda x: (x, "sum"),
    "all_reduce, avg": lambda x: (x, "avg"),
    "all_gather_tensor": lambda x: (x, 0),
    "all_gather_tensor, columns": lambda x: (x, 1),
    "reduce_scatter_tensor": lambda x: (x, "sum", 0),
    "reduce_scatter_tensor, max": lambda x: (x, "max", 0),
    "all_to_all_single": lambda x: (x, None, None),
    "broadcast": lambda x: (x, len(x) - 1),
    "permute_tensor": lambda x: (x.flatten(), [*range(1, len(x)), 0]),
    "all_reduce_coalesced": lambda x: ([x, 2 * x, x[:1]], "sum"),
    "all_gather_into_tensor_coalesced": lambda x: ([x, x[:, :2].contiguous()],),
    "reduce_scatter_tensor_coalesced": lambda x: ([x, 3 * x], "sum", [0, 0]),
    "all_gather_tensor_autograd": lambda x: (x, 0),
    "reduce_scatter_tensor_autograd": lambda x: (x, "sum", 0),
    "all_to_all_single_autograd": lambda x: (x, None, None),
}


# torch calls the names of before 2.13 deprecated; they are those that the oldest torch has, too.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives(comm, name):
    def program():
        x = values(dist.get_world_size(), 3).requires_grad_("autograd" in name)
        found = getattr(functional, name.partition(",")[0])(*FUNCTIONAL[name](x), dist.group.WORLD)
        parts = [part * 1 for part in (found if isinstance(found, list | tuple) else [found])]
        if x.requires_grad:
            (parts[0] * (dist.get_rank() + 1)).sum().backward()
        return [part.detach() for part in parts], x.grad

    same_on_both(comm, program)

"""Sub-groups in any order, several at once, meshes, and a group after another."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.torch_backend.backends import BACKEND, process_group, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def mine(count=5):
    return torch.arange(count, dtype=torch.float64) + 10.0 * dist.get_rank()


def test_every_subset_in_every_order(comm):
    def program():
        size, me, found = dist.get_world_size(), dist.get_rank(), []
        orders = [
            list(order)
            for count in range(1, size + 1)
            for order in itertools.permutations(range(size), count)
        ][-14:]
        groups = [(order, dist.new_group(order)) for order in orders]
        for order, group in groups:
            if me in order:
                total, parts = mine(), [torch.empty(2, dtype=torch.float64) for _ in order]
                dist.all_reduce(total, group=group)
                dist.all_gather(parts, mine(2), group=group)
                told = mine()
                dist.broadcast(told, src=order[-1], group=group)
                found += [total, *parts, told, torch.tensor(dist.get_rank(group))]
        return found

    same_on_both(comm, program)


def test_a_group_of_ours_in_a_world_of_gloo_and_the_reverse(comm):
    others = {BACKEND: "gloo", "gloo": BACKEND}
    for world, inside in others.items():
        with process_group(comm, world):
            group = dist.new_group(list(range(comm.size))[::-1], backend=inside)
            assert dist.get_backend(group) == inside
            dist.all_reduce(x := mine(), group=group)
            dist.all_reduce(y := mine())
            torch.testing.assert_close(x, y)

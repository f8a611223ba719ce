"""Movements between layouts, and what a gradient means on the way."""

import pytest
import torch

from distdl_rma import Machine, shard
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.site import site_of
from distdl_rma.layers.split.redistribution import all_sum, once, redistributed, reduced, to_blocks
from distdl_rma.testing import block
from tests.layers.split.against_whole import check, numbers

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

SHAPE = (3, 4, 5, 7)


def test_a_tensor_comes_back_from_any_layout(P_world):
    def there_and_back(x):
        if not hasattr(x, "redistribute"):
            return x * 2
        layout = x.decomposition
        for axes in ((0, 1, 2, 3), (3, 2, 1, 0), (None, None, 3, 2), (None,) * 4, (2, None, 0, 1)):
            x = x.redistribute(*axes)
        return x.redistribute(layout=layout) * 2

    check(P_world, there_and_back, [numbers(*SHAPE)])


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions_are_alike_on_all_ranks(P_world, P_x, comm, op):
    machine = Machine.of(P_world)
    mine = torch.arange(6.0, dtype=torch.float64) * (1 + P_x.rank) - 3 * P_x.rank
    found = reduced(site_of(machine, reduced), mine, P_x.ranks, op)
    every = torch.stack(comm.allgather(mine))
    wanted = {"sum": every.sum(0), "max": every.amax(0), "min": every.amin(0)}[op]
    assert torch.equal(found, wanted)


def test_short_types_are_summed_in_a_longer_one(P_world):
    mine = torch.full((3,), 1 + 2**-7, dtype=torch.bfloat16)
    found = reduced(site_of(Machine.of(P_world), all_sum), mine, P_world.ranks)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (mine.float() * P_world.size).to(torch.bfloat16))


def test_a_sum_hands_its_gradient_on_and_copies_for_blocks_sum_it(P_world, P_x):
    machine, layout = Machine.of(P_world), lay.balanced(P_x, SHAPE)
    x = torch.ones(2, requires_grad=True)
    site = site_of(machine, to_blocks)
    all_sum(site, x, layout, [2]).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
    x.grad = None
    (to_blocks(site, x, layout, [2]) * (1 + layout.partition.rank)).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), float(sum(range(1, P_world.size + 1)))))


def test_a_plain_tensor_beside_copies_contributes_once(P_world, P_x):
    layout = lay.replicated(P_x, SHAPE)
    x = torch.ones(2, requires_grad=True)
    once(x, layout).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), float(P_world.rank == 0)))
    assert once(x, lay.balanced(P_x, SHAPE)) is x


@pytest.mark.mpi(min_size=2)
def test_a_second_derivative_is_refused(P_world, P_x):
    x, site = block(P_x, numbers(*SHAPE)), site_of(Machine.of(P_world), redistributed)
    y = redistributed(site, x.to_local(), x.decomposition, lay.whole(x.decomposition, [2]))
    with pytest.raises(Exception, match="second derivatives"):
        torch.autograd.grad(y.square().sum(), x.to_local(), create_graph=True)


@pytest.mark.mpi(min_size=4)
def test_many_sizes_of_which_ranks_see_different_numbers(comm):
    # Rows of 5 and 6 are blocks of 3 and 2, and of 3 and 3: what is kept of the first is one kind here, two
    # kinds there. Ranks that let go of a movement at different times would wait for each other.
    with Machine(comm, timeout=15) as machine:
        P_x, other = machine.partition((1, 2, 2)), torch.randn(2, 4, 3, dtype=torch.float64)
        for rows in (*range(3, 28), *range(3, 12)):
            x = torch.randn(2, rows, 4, dtype=torch.float64)
            product = torch.bmm(shard(P_x, x), shard(P_x, other))
            totals = [shard(P_x, x).sum(dim) for dim in (1, 2)]
            torch.testing.assert_close(product.full_tensor(), x @ other)
            torch.testing.assert_close(totals[0].full_tensor(), x.sum(1))

"""Plain tensors beside split ones: contributions for those who sum them later, whole gradients for others."""

import pytest
import torch

from distdl_rma import UnsupportedError
from distdl_rma.layers.ops.core.autograd import mark_summed_later
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.site import THREAD, pop_module
from distdl_rma.layers.split.plain_operands import beside, contributes
from distdl_rma.testing import block

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]
SHAPE = (2, 3, 5, 4)


@pytest.fixture
def cut(P_x):
    return lay.balanced(P_x, SHAPE)


def test_a_gradient_is_whole_or_a_contribution(cut):
    rank, size = cut.partition.rank, cut.partition.size
    for layout in (cut, lay.replicated(cut.partition, SHAPE)):
        for summed_later in (False, True):
            x = torch.ones(3, requires_grad=True)
            mark_summed_later(x, summed_later)
            (beside(x, layout) * (1 + rank * bool(layout.cut_dims))).sum().backward()
            if not layout.cut_dims:
                wanted = float(not summed_later or rank == 0)
            else:
                wanted = 1 + rank if summed_later else size * (size + 1) / 2
            assert torch.equal(x.grad, torch.full((3,), float(wanted)))


def test_without_a_graph_nothing_is_done(cut):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert beside(x, cut) is x


def test_where_somebody_else_sums_all_gradients_are_contributions(cut):
    x, rank = torch.ones(3, requires_grad=True), cut.partition.rank
    THREAD.stack.append(("model", True, True))
    (beside(x, cut) * (1 + rank)).sum().backward()
    pop_module()
    assert torch.equal(x.grad, torch.full((3,), 1.0 + rank))


def test_what_is_computed_is_as_what_it_is_computed_of(cut):
    ours, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    mark_summed_later(ours, True)
    twice = ours.exp() * 2
    assert contributes(ours) and contributes(twice) and contributes(twice + 1)
    assert not contributes(other) and not contributes(other.sin() + torch.ones(3))
    for mixed in (ours * other, twice - other):
        with pytest.raises(UnsupportedError, match="other learnable tensors"):
            contributes(mixed)
    mark_summed_later(ours, False)
    assert not contributes(ours)


def test_what_was_a_split_tensor_has_a_whole_gradient(cut):
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    split = block(cut.partition, x)
    assert not contributes(split.full_tensor())
    assert not contributes((split.sum().full_tensor() * 2).exp())
    for of in (x, split):
        everything = of.full_tensor() if of is split else of
        (everything.flip(2) * of).square().sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)


def test_a_parameter_whose_sync_is_gone_is_one_of_others_again():
    parameter = torch.ones(2, requires_grad=True)
    # Hooks keep the last node of its graphs, whatever becomes of these.
    last = (parameter * 1).grad_fn.next_functions[0][0]
    mark_summed_later(parameter, True)
    assert contributes(parameter * 2)
    mark_summed_later(parameter, False)
    assert last is not None and not contributes(parameter * 2)

"""Results of ranks without work are in the graph of all that they might have come from."""

import pytest
import torch

from distdl_rma.ops.core.idle_ranks import deliver, idle, tied


@pytest.mark.parametrize(
    ("shape", "wanted"), [((3, 4), (3, 0)), ((3,), (3, 0)), ((), (0,)), ((3, 0, 2), (3, 0, 2)), ((0,), (0,))]
)
def test_an_idle_result_has_no_elements(shape, wanted):
    x = torch.ones(shape, requires_grad=True)
    weight = torch.ones(2, 2, requires_grad=True)
    y = idle(x, (weight, None))
    assert y.shape == wanted and y is not x
    y.sum().backward()
    assert not weight.grad.any() and x.grad.shape == x.shape and not x.grad.any()


def test_tied_values_do_not_change():
    y, other = torch.arange(3.0), torch.full((2,), float("nan"), requires_grad=True)
    together = tied(y, (other,))
    assert torch.equal(together, y) and together.requires_grad


def test_what_is_delivered_outside_keeps_the_batch():
    y = torch.ones(3, 4, requires_grad=True)
    assert deliver(y, True, 3) is y
    assert deliver(y, False, 3).shape == (3, 0)
    assert deliver(y, False, None).shape == (0,)
    deliver(y, False, 3).sum().backward()
    assert not y.grad.any()

"""What autograd operations share: graphs of ranks that need no gradient, refusals, failures."""

import pytest
import torch

from distdl_rma import ShapeError, UnsupportedError
from distdl_rma.errors import ExchangeTimeout
from distdl_rma.layers.ops.core.autograd import (
    GradientNeeds,
    OperatorFunction,
    anchor,
    anchored,
    first_derivative,
    idle,
    reports_failures,
    tied,
)


class Machine:
    """Records the reports of failures."""

    closed = False

    def __init__(self, lasting=False):
        self.failures, self.errors_of_all, self.labels, self.segments = [], [], self, self
        # What ranks raise together; and whether sums that may be half done forbid that.
        self.settled, self.lasting = [], lasting

    def settle(self, error):
        self.settled.append(error)

    def fail(self, error):
        self.failures.append(error)

    def announce_error(self, error):
        self.errors_of_all.append(error)

    def make_readable(self, error):
        error.args = (error.args[0].replace("Kind#1", "down.0"),)


class Layer:
    def __init__(self):
        self.machine = Machine()

    @reports_failures
    def forward(self, error):
        raise error


@pytest.mark.parametrize(("kind", "reported"), [(ShapeError, 0), (ValueError, 1)])
def test_a_failure_that_not_all_ranks_raise_is_reported_to_peers(kind, reported):
    layer, error = Layer(), kind("'Kind#1': no")
    with pytest.raises(kind, match=r"^'down\.0': no$"):
        layer.forward(error)
    assert layer.machine.failures == [error][:reported]
    layer.machine.closed = True
    with pytest.raises(kind):
        layer.forward(error)
    assert len(layer.machine.failures) == reported


class Double(OperatorFunction):
    machine, error = None, ValueError("negative")

    @staticmethod
    def forward(ctx, x):
        ctx.machine = Double.machine
        return 2 * x

    @staticmethod
    @first_derivative
    def backward(ctx, gradient):
        if gradient.sum() < 0:
            raise Double.error
        return 2 * gradient


def test_a_backward_is_refused_in_a_graph():
    Double.machine = Machine()
    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(Double.apply(x).sum(), x, create_graph=True)
    assert not (Double.machine.failures or Double.machine.errors_of_all)


@pytest.mark.parametrize(
    ("kind", "lasting", "reported"),
    [
        (ValueError, False, "errors_of_all"),
        (ValueError, True, "errors_of_all"),
        (ExchangeTimeout, False, "settled"),
        (ExchangeTimeout, True, "failures"),
    ],
)
def test_an_error_of_a_backward_that_may_come_to_all_leaves_the_machine_usable(
    monkeypatch, kind, lasting, reported
):
    machine, error = Machine(lasting), kind("negative")
    monkeypatch.setattr(Double, "machine", machine)
    monkeypatch.setattr(Double, "error", error)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(kind, match="negative"):
        (-Double.apply(x)).sum().backward()
    for name in ("failures", "errors_of_all", "settled"):
        assert getattr(machine, name) == ([error] if name == reported else [])


def test_a_result_is_in_a_graph_where_any_rank_needs_a_gradient():
    assert [GradientNeeds(*both).any for both in ((0, 0), (1, 0), (0, 1))] == [0, 1, 1]
    y = torch.rand(2)
    assert anchored(y, needed=False) is y
    tied = anchored(y)
    assert tied.requires_grad and torch.equal(tied, y)
    tied.sum().backward()
    assert anchored(tied) is tied
    assert not anchored(torch.arange(2)).requires_grad
    with torch.no_grad():
        assert anchored(y) is y and anchor(True) is None


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

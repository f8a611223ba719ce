"""What a program asks of a split tensor."""

import numpy as np
import pytest
import torch

from distdl_rma import UnsupportedError
from distdl_rma.layers.split import SplitTensor
from tests.layers.split.against_whole import check, cut_along, on_grids

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 5, 4)
QUESTIONS = [
    lambda x: tuple(x.shape),
    lambda x: (x.size(-1), x.dim(), x.numel(), len(x), x.ndim),
    lambda x: (x.dtype, x.device, x.is_floating_point(), x.is_complex(), x.element_size()),
    lambda x: (x.requires_grad, x.is_leaf, (x + 1).is_leaf),
    lambda x: (x.nbytes, torch.result_type(x, 1.0), torch.result_type(2, x)),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_answers_are_those_of_the_whole(P_world, ask):
    whole = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    assert all(ask(x) == ask(whole) for x in on_grids(P_world, whole))


def test_data_is_read_outside_of_the_graph_and_not_written(P_world):
    whole = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    x = cut_along(P_world, 2, whole)
    y = x * 2
    data = y.data
    assert not data.requires_grad and data.to_local().data_ptr() == y.to_local().data_ptr()
    torch.testing.assert_close((data + 1).full_tensor(), whole.detach() * 2 + 1)
    (y * data).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 4 * whole.detach())
    with pytest.raises(UnsupportedError, match="it changes what torch has"):
        data.add_(1)


@pytest.mark.mpi(min_size=2)
def test_gradients_hooks_and_values(P_world):
    whole = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    x, seen = cut_along(P_world, 2, whole), []
    x.register_hook(lambda gradient: seen.append(gradient.shape))
    total = (x * x).sum()
    total.backward()
    assert seen == [torch.Size(SHAPE)]
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole.detach())
    value = total.detach()
    assert float(value) == value.item()
    assert bool(value > 0)
    assert f"{value:.3f}" == f"{value.item():.3f}" and f"{value}" == f"{value.item()}" and f"{x}" == repr(x)
    for use in (lambda: f"{x:.3f}", lambda: bool(x > 0)):
        with pytest.raises(UnsupportedError, match="the values are on many ranks"):
            use()
    x.grad = None
    assert x.grad is None
    x.grad = 3 * whole.detach()
    torch.testing.assert_close(x.grad.full_tensor(), 3 * whole.detach())
    for wrong in (torch.ones(3 * SHAPE[0], *SHAPE[1:]), torch.ones(2, 3, 6, 4)):
        with pytest.raises(RuntimeError, match=r"gradient has shape .* its tensor \(2, 3, 5, 4\)"):
            (x * 2).backward(wrong.double())
        with pytest.raises(RuntimeError, match="gradient has shape"):
            x.grad = wrong.double()
    with pytest.raises(TypeError, match="0-d"):
        len(total)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["split", "plain"])
def test_a_backward_of_some_inputs_leaves_the_others(P_world, kind):
    torch.manual_seed(0)
    whole, weight = torch.randn(SHAPE, requires_grad=True), torch.randn(3, 1, 1, requires_grad=True)
    x, other = cut_along(P_world, 2, whole), weight.detach().clone().requires_grad_()
    for inputs, mine in (([whole], [x]), (whole, x), ([whole, weight], [x, other])):
        (whole * weight).square().sum().backward(inputs=inputs)
        loss = (x * other).square().sum()
        if kind == "plain":
            loss = loss.full_tensor()
        loss.backward(inputs=mine)
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
        assert (other.grad is None) is (weight.grad is None)
    torch.testing.assert_close(other.grad, weight.grad)


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numpy_gets_no_values_of_what_is_cut_and_those_of_copies(P_world):
    x = cut_along(P_world, 1, torch.randn(3, 5))
    for function in (np.mean, np.sum, np.max, np.std, np.prod, np.argmax, np.ravel, np.vstack):
        with pytest.raises(
            UnsupportedError, match=rf"numpy\.{function.__name__} at test_queries.* full_tensor"
        ):
            function(x)
    for function in (np.asarray, np.abs, np.float64):
        with pytest.raises(UnsupportedError, match=r"Tensor\.\w+ at test_queries.* full_tensor"):
            function(x)
    assert (np.shape(x), np.ndim(x)) == ((3, 5), 2)
    copies = x.redistribute()
    assert np.array_equal(np.vstack([copies, copies]), np.vstack([x.full_tensor()] * 2))
    with pytest.raises(TypeError):
        np.concatenate(copies, axis="no axis")


@pytest.mark.sizes(1, 2, 3)
def test_they_are_plain_and_cut_where_they_are_used(P_world):
    x = cut_along(P_world, 1, torch.randn(3, 7, 5))
    zeros = x.new_zeros((7, 5)), x.new_zeros(x.shape[1:])
    for made in (x.new_empty(7, 5), x.new_ones(7, 5), x.new_full((7, 5), 2.0), *zeros):
        assert not isinstance(made, SplitTensor)
        assert (made.shape, made.dtype) == ((7, 5), x.dtype)
    assert x.new_zeros(2, dtype=torch.int32).dtype == torch.int32
    assert x.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    whole = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    check(P_world, lambda x: x + x.new_full(x.shape, 2.0) * x.new_ones(7, 1), [whole])

"""Functions of single elements, also of lists of tensors."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError
from tests.split.against_whole import block, check, grids, whole
from tests.split.samples import check_functions

SHAPE = 2, 3, 5, 4


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(10))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "elements.pointwise", part, 10)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("extent", [1, 5])
def test_comparisons_write_whole_numbers_whatever_needs_a_gradient(P_world, extent):
    def written(x, y):
        found = [x.clone().greater_(y), x.bool().eq_(y), x.clone().copy_(y), x.clone().logical_and_(y)]
        return [each.detach() for each in found]

    y = torch.ones(extent, 2, requires_grad=True)
    check(P_world, written, [torch.arange(extent * 2).view(extent, 2), y], gradients=False)


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 3])
def test_prelu(P_world, count):
    check(P_world, F.prelu, [numbers(SHAPE)], [numbers((count,))])
    check(P_world, lambda w, x: F.prelu(weight=w, input=x), [numbers((count,))], [numbers(SHAPE)])


@pytest.mark.mpi
def test_prelu_of_numbers_and_vectors(P_world):
    check(P_world, lambda w, x: F.prelu(x, w), [numbers((1,))], [numbers(())])
    check(P_world, lambda x: F.prelu(x.sum(), x.mean()), [numbers((5,))])
    check(P_world, F.prelu, [numbers((5,))], [numbers(())])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_tensors_that_are_cut_otherwise_move(P_world):
    def moved(x, y):
        return x * (y.redistribute(None, None, None, 0) if hasattr(y, "redistribute") else y) + 1

    size = P_world.size
    check(
        P_world,
        moved,
        [numbers((4, 3, 5, 4)), numbers((4, 3, 5, 4))],
        only=[(1, 1, 1, size), (1, 1, size, 1)],
    )


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_copies_beside_blocks(P_world):
    def gated(x, y):
        gate = y.redistribute() if hasattr(y, "redistribute") else y
        return x * gate.sigmoid()

    check(P_world, gated, [numbers(SHAPE), numbers((2, 3, 1, 1))])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_elements_are_compared_with_all_of_others(P_world):
    x, bounds = numbers(SHAPE).detach(), torch.linspace(-1, 1, 7, dtype=torch.float64)
    for function in (
        torch.bucketize,
        lambda x, b: torch.bucketize(x, boundaries=b, right=True, out_int32=True),
        lambda x, b: torch.bucketize(0.3, b),
        lambda x, b: torch.isin((3 * x).round(), (b * 3).round()),
        lambda x, b: torch.isin(elements=x, test_elements=b[:2], invert=True),
    ):
        check(P_world, function, [x], [bounds], gradients=False)
    check(P_world, lambda x, y: torch.isin(x, y[:1] * 1.0), [x, x.clone()], gradients=False)
    check(P_world, lambda x: torch.isin(x, 0.0), [x], gradients=False)


pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]
OPTIMIZERS = [
    *(
        partial(kind, foreach=True)
        for kind in (optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop)
    ),
    *(
        partial(kind, **how)
        for how in ({"foreach": True}, {"fused": True})
        for kind in (
            partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            partial(optim.SGD, lr=0.1, maximize=True),
            partial(optim.Adam, lr=0.1, amsgrad=True),
            partial(optim.AdamW, lr=0.1, weight_decay=0.1),
            partial(optim.Adagrad, lr=0.1),
        )
    ),
    partial(optim.RMSprop, foreach=True, centered=True, momentum=0.5),
]


@pytest.mark.parametrize("at", range(len(OPTIMIZERS)))
def test_optimizers_of_lists_step_as_on_whole_tensors(P_world, at):
    wholes = [numbers((3, 7)), numbers((1, 7)), numbers(7)]
    for grid in grids(2, P_world.size):
        P_x = P_world.create_cartesian_topology_partition(grid)
        alone = [x.detach().clone().requires_grad_() for x in wholes]
        split = [*(block(P_x, x) for x in wholes[:2]), wholes[2].detach().clone().requires_grad_()]
        for x, row, plain in (alone, split):
            parameters = [x, row, plain]
            optimizer = OPTIMIZERS[at](parameters)
            for _ in range(3):
                optimizer.zero_grad()
                loss = (x * plain).square().sum() + (row * plain).cos().sum()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
                nn.utils.clip_grad_value_(parameters, 0.3, foreach=True)
                optimizer.step()
        for one, other in zip(split, alone, strict=True):
            torch.testing.assert_close(whole(one).detach(), other.detach(), atol=1e-12, rtol=1e-10)


FUNCTIONS = [
    lambda *x: torch._foreach_add(x, 2),
    lambda *x: torch._foreach_add(x, x[::-1], alpha=3),
    lambda *x: torch._foreach_sub(x, [1.0, 2.0, 3.0]),
    lambda *x: torch._foreach_mul(x, torch.tensor(2.0)),
    lambda *x: torch._foreach_pow(2.0, x),
    lambda *x: torch._foreach_lerp(x, x[::-1], 0.3),
    lambda *x: torch._foreach_addcmul(x, x, x[::-1], [1.0, 2.0, 3.0]),
    lambda *x: torch._foreach_addcdiv(x, x, torch._foreach_exp(x), value=0.5),
    lambda *x: torch._foreach_norm(x),
    lambda *x: torch._foreach_norm(x, 1),
    lambda *x: torch._foreach_norm(x, float("inf")),
    lambda *x: torch._foreach_max(x),
    lambda *x: torch._foreach_sigmoid(torch._foreach_abs(x)),
    lambda *x: torch._foreach_maximum(x, 0.1),
    lambda *x: torch._foreach_minimum(x, x[::-1]),
]


@pytest.mark.parametrize("at", range(len(FUNCTIONS)))
def test_functions_of_lists_are_those_of_each_tensor(P_world, at):
    # What is plain in a loss of split tensors meets one of them.
    def function(*x):
        return [y * x[0] for y in FUNCTIONS[at](*x)]

    check(P_world, function, [numbers((3, 7)), numbers((3, 7))], [numbers(7)])


def test_lists_are_changed_in_place(P_world):
    def function(x, y, plain):
        lists = [x * 1, y * 1], [y * 2, (x * plain).sum(0, keepdim=True)]
        assert torch._foreach_add_(*lists)[0] is lists[0][0]
        torch._foreach_clamp_max_(lists[0], 0.5)
        torch._foreach_zero_([x.detach()[:1].clone()])
        copies = [y.detach().clone()]
        torch._foreach_copy_(copies, [y.detach() * plain.detach()])
        lists[1][0] += copies[0]
        torch._foreach_addcdiv_(lists[1], [y, y], [y.exp(), y.exp()], [0.5, 2])
        return lists

    check(P_world, function, [numbers((3, 7)), numbers((1, 7))], [numbers(7)])


def test_states_that_are_cut_otherwise_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size))
    x = block(P_x, numbers((3, 7)))
    gradient, state = (block(P_x, numbers((3, 7)).detach()) for _ in range(2))
    optimizer = optim.SGD([x], lr=0.1, momentum=0.9, fused=True)
    x.grad = gradient
    optimizer.step()
    optimizer.state[x]["momentum_buffer"] = state.redistribute()
    with pytest.raises(UnsupportedError, match=r"_fused_sgd_.* are not cut alike"):
        optimizer.step()

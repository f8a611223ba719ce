"""Functions of single elements, also of lists of tensors."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError
from distdl_rma.testing import block, grids
from tests.layers.split.against_whole import called, check, cut_along, forms, numbers, whole
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE, ROWS = (2, 3, 5, 4), (3, 7)
X, BOUNDS = torch.linspace(-2, 2, 120).double().view(SHAPE), torch.linspace(-1, 1, 7, dtype=torch.float64)


def gated(x, y):
    gate = y.redistribute() if hasattr(y, "redistribute") else y
    return x * gate.sigmoid()


# Functions of lists; what is plain in a loss of split tensors meets one of them.
OF_LISTS = [
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


def lists_in_place(x, y, plain):
    lists = [x * 1, y * 1], [y * 2, (x * plain).sum(0, keepdim=True)]
    assert torch._foreach_add_(*lists)[0] is lists[0][0]
    torch._foreach_clamp_max_(lists[0], 0.5)
    torch._foreach_zero_([x.detach()[:1].clone()])
    copies = [y.detach().clone()]
    torch._foreach_copy_(copies, [y.detach() * plain.detach()])
    lists[1][0] += copies[0]
    torch._foreach_addcdiv_(lists[1], [y, y], [y.exp(), y.exp()], [0.5, 2])
    return lists


# Forms beyond torch's samples.
FORMS = {
    **{
        f"{name} slopes of channels": form
        for n in (1, 3)
        for name, form in {
            f"{n} plain": (F.prelu, [SHAPE], [(n,)]),
            f"{n} split": (lambda w, x: F.prelu(weight=w, input=x), [(n,)], [SHAPE]),
        }.items()
    },
    "the slope of a number": (lambda w, x: F.prelu(x, w), [(1,)], [()]),
    "the slope of a sum": (lambda x: F.prelu(x.sum(), x.mean()), [(5,)]),
    "a slope without dimensions": (F.prelu, [(5,)], [()]),
    "copies beside blocks": (gated, [SHAPE, (2, 3, 1, 1)]),
    **{
        f"list {at}": (lambda *x, f=f: [y * x[0] for y in f(*x)], [ROWS, ROWS], [(7,)])
        for at, f in enumerate(OF_LISTS)
    },
    "lists in place": (lists_in_place, [ROWS, (1, 7)], [(7,)]),
}
COMPARED = {
    "buckets": (torch.bucketize, [X], [BOUNDS]),
    "buckets by name": (
        lambda x, b: torch.bucketize(x, boundaries=b, right=True, out_int32=True), [X], [BOUNDS]
    ),
    "the bucket of a number": (lambda x, b: torch.bucketize(0.3, b), [X], [BOUNDS]),
    "elements": (lambda x, b: torch.isin((3 * x).round(), (b * 3).round()), [X], [BOUNDS]),
    "elements by name": (
        lambda x, b: torch.isin(elements=x, test_elements=b[:2], invert=True), [X], [BOUNDS]
    ),
    "split elements": (lambda x, y: torch.isin(x, y[:1] * 1.0), [X, X]),
    "a number": (called(torch.isin, 0.0), [X]),
}  # fmt: skip
test_forms = forms(FORMS)
test_comparisons = forms(COMPARED, gradients=False)
test_samples_of_torch = samples_of("pointwise", 10)


@pytest.mark.parametrize("extent", [1, 5])
def test_comparisons_write_whole_numbers_whatever_needs_a_gradient(P_world, extent):
    def written(x, y):
        found = [x.clone().greater_(y), x.bool().eq_(y), x.clone().copy_(y), x.clone().logical_and_(y)]
        return [each.detach() for each in found]

    y = torch.ones(extent, 2, requires_grad=True)
    check(P_world, written, [torch.arange(extent * 2).view(extent, 2), y], gradients=False)


def test_comparisons_with_what_is_no_tensor_are_pythons(P_world):
    x = cut_along(P_world, 0, torch.ones(5, 2))
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "text"


@pytest.mark.sizes(2, 3, 4)
def test_tensors_that_are_cut_otherwise_move(P_world):
    def moved(x, y):
        return x * (y.redistribute(None, None, None, 0) if hasattr(y, "redistribute") else y) + 1

    only = [(1, 1, 1, P_world.size), (1, 1, P_world.size, 1)]
    check(P_world, moved, [numbers(4, 3, 5, 4), numbers(4, 3, 5, 4)], only=only)


BY_LISTS = optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop
FUSED = (
    partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(optim.SGD, lr=0.1, maximize=True),
    partial(optim.Adam, lr=0.1, amsgrad=True),
    partial(optim.AdamW, lr=0.1, weight_decay=0.1),
    partial(optim.Adagrad, lr=0.1),
)
OPTIMIZERS = [
    *(partial(kind, foreach=True) for kind in BY_LISTS),
    *(partial(kind, **how) for how in ({"foreach": True}, {"fused": True}) for kind in FUSED),
    partial(optim.RMSprop, foreach=True, centered=True, momentum=0.5),
]


@pytest.mark.parametrize("at", range(len(OPTIMIZERS)))
def test_optimizers_of_lists_step_as_on_whole_tensors(P_world, at):
    wholes = [numbers(3, 7), numbers(1, 7), numbers(7)]
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


@pytest.mark.mpi(min_size=2)
def test_states_that_are_cut_otherwise_are_refused(P_world):
    x, gradient, state = (
        cut_along(P_world, 1, torch.randn(3, 7, requires_grad=needs)) for needs in (True, False, False)
    )
    optimizer = optim.SGD([x], lr=0.1, momentum=0.9, fused=True)
    x.grad = gradient
    optimizer.step()
    optimizer.state[x]["momentum_buffer"] = state.redistribute()
    with pytest.raises(UnsupportedError, match=r"_fused_sgd_.* are not cut alike"):
        optimizer.step()

"""Autograd functions that know nothing of split tensors, called on them."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distdl_rma import UnsupportedError, shard
from distdl_rma.testing import block
from tests.layers.split.against_whole import forms, numbers

pytestmark = pytest.mark.mpi
Function = torch.autograd.Function


def made(name, forward, backward):
    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


# Straight through, with a backward that is not linear.
Round = made("Round", lambda ctx, x: x.round(), lambda ctx, g: g.clamp(-0.5, 0.5))
# Its gradients are of another type, and of a shape that torch sums to that of the argument.
Wide = made("Wide", lambda ctx, x, row: x.double() * row, lambda ctx, g: (g * 2, g * 3))
# Changes its argument, and needs no value of it.
ScaleInPlace = made(
    "ScaleInPlace", lambda ctx, x: ctx.mark_dirty(x) or x.mul_(2), lambda ctx, g: (g * 2).clamp(-1, 1)
)


class Sigmoid(Function):
    """Saves what it returns."""

    @staticmethod
    def forward(ctx, x):
        y = torch.sigmoid(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y * (1 - y) + 0 * x


class Reversed(Function):
    """Returns what it was given."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Scaled(Function):
    """Several tensors and a parameter in, two results of other shapes out, in torch's newer form."""

    @staticmethod
    def forward(x, z, weight):
        return x * z * weight, (x + z).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, h):
        x, z, weight = ctx.saved_tensors
        # Of both gradients together, which no two calls could make.
        g = (g + h[..., None]).clamp(-0.5, 0.5)
        return g * z * weight, g * x * weight, (g * x * z).sum(0)


class ExpInPlace(Function):
    """Changes its argument, says so, and saves what it made of it."""

    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return (gradient * y).clamp(-1, 1)


class InPlace(Function):
    """Changes two of its arguments, and returns them in the other order behind a third result."""

    @staticmethod
    def forward(ctx, x, z, weight):
        ctx.save_for_backward(weight)
        y = x + z
        ctx.mark_dirty(x, z)
        return y, z.mul_(3), x.mul_(weight)

    @staticmethod
    def backward(ctx, g, of_z, of_x):
        (weight,) = ctx.saved_tensors
        return g + of_x * weight, g + 3 * of_z, None


def two_in_place(x, z, weight):
    x, z = x * 1, z * 2
    row, other = x[:, 1:], torch.ones_like(x) * 2
    before = x + 1
    y, same_z, same_x = InPlace.apply(x, z, weight)
    assert same_x is x and same_z is z
    ScaleInPlace.apply(z)
    z = ExpInPlace.apply(ScaleInPlace.apply(z.mul_(0.1)))
    # An argument outside of the graph, of which there is a view.
    column = other[:, :2]
    InPlace.apply(other, Round.apply(y), weight)
    return torch.cat([each.flatten() for each in (before, row * 2, z, x, y, other, column)])


def view_in_place(x):
    y = x * 1
    z = y[..., 1:3]
    assert ExpInPlace.apply(z) is z
    return torch.cat([(z * 2).flatten(), y.square().flatten()])


def of_a_result_in_place(x):
    # A result that no function has used yet.
    y = Round.apply(x)
    z = Round.apply(y * 2)
    return ScaleInPlace.apply(y) * z


def hooked(x):
    # A hook sees all of the gradient of a result.
    y = Sigmoid.apply(x)
    y.register_hook(lambda g: g.clamp(-0.3, 0.3))
    return Round.apply(y) + y * 2


OF_ONE = [
    Round.apply,
    lambda x: Round.apply(x * 2) + x,
    lambda x: Sigmoid.apply(x).square(),
    lambda x: Reversed.apply(x, 0.3) * x,
    lambda x: Round.apply(Sigmoid.apply(Reversed.apply(x, 2))).flatten(1),
    lambda x: Round.apply(x).mul_(2) + x,
    lambda x: Round.apply(x.mean(-1, keepdim=True)) * x,
    lambda x: Round.apply(y := Sigmoid.apply(x)) + y,
    lambda x: ScaleInPlace.apply(ScaleInPlace.apply(x * 0.1)) * x,
    view_in_place,
    of_a_result_in_place,
    hooked,
]
# Gradients of several results come to one backward.
OF_SEVERAL = [
    lambda x, z, w: torch.cat([y.flatten() for y in Scaled.apply(x, z, w)]),
    lambda x, z, w: Scaled.apply(x, z, w)[1],
    lambda x, z, w: Scaled.apply(x, x * z, w)[0] * Scaled.apply(x, x, w)[0],
    two_in_place,
]
FORMS = {
    **{f"{at} of {s}": (f, [s]) for s in ((2, 3, 7, 5), (2, 1, 5)) for at, f in enumerate(OF_ONE)},
    **{f"{at} of several": (f, [(4, 7), (4, 7)], [(7,)]) for at, f in enumerate(OF_SEVERAL)},
}
ROW = lambda x, row: Wide.apply(x, row) * 2, [lambda: numbers(4, 7, dtype=torch.float32), (1, 7)]
test_forms = forms(FORMS)
test_other_types = forms({"a row": ROW}, atol=1e-5)


def test_a_result_is_first_used_anyhow(P_x, whole):
    for use in (
        lambda y: y.register_hook(lambda g: g * 2),
        lambda y: y.retain_grad(),
        lambda y: y.to_local(),
        lambda y: y.square(),
    ):
        x = shard(P_x, whole).requires_grad_()
        y = Round.apply(x)
        assert y.requires_grad and not y.is_leaf and y.grad_fn.name() == "RoundBackward"
        with torch.no_grad():
            use(y)
        y.sum().backward()
        assert x.grad.full_tensor().eq(0.5).all()
        assert y.is_leaf is False


def test_a_result_is_an_argument_of_a_checkpoint(P_x, whole):
    found = []
    for x in (whole.clone().requires_grad_(), shard(P_x, whole).requires_grad_()):
        y = checkpoint(lambda y: torch.tanh(y * 2), Sigmoid.apply(x), use_reentrant=False)
        y.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1].full_tensor(), found[0])


def test_a_gradient_is_asked_for_and_a_graph_is_gone_through_again(P_x, whole):
    whole = whole.requires_grad_()
    x = block(P_x, whole)
    y, z = Sigmoid.apply(x), Sigmoid.apply(whole)
    loss, expected = (y * y.detach()).sum(), (z * z.detach()).sum()
    for _ in range(2):
        found = torch.autograd.grad(loss, [x, y], retain_graph=True)
        wanted = torch.autograd.grad(expected, [whole, z], retain_graph=True)
        torch.testing.assert_close([one.full_tensor() for one in found], [*wanted])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_cannot_be_exact_is_refused(P_x, whole):
    x = shard(P_x, whole).requires_grad_()
    number = torch.tensor(2.0, dtype=whole.dtype, requires_grad=True)
    with pytest.raises(UnsupportedError, match="takes a plain tensor that was computed with a gradient"):
        Scaled.apply(x, x, number * 2)[0] + 1

    y = x * 1
    z = Round.apply(y)
    y.mul_(2)
    with pytest.raises(UnsupportedError, match="changed in place before its result was used"):
        z + 1


def test_a_change_in_place_of_what_has_no_graph_is_as_in_torch(P_x, whole):
    for make in (whole.clone, lambda: shard(P_x, whole.clone())):
        x = make()
        view = x[..., 1:]
        assert ExpInPlace.apply(x) is x and not x.requires_grad
        with torch.no_grad():
            y = x * 1
            assert ExpInPlace.apply(y) is y and y.is_leaf
            # Torch returns another tensor of what requires a gradient, without a gradient.
            y.requires_grad_()
            z = ScaleInPlace.apply(y)
            assert z is not y and not z.requires_grad and y.requires_grad
        found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in (view, y.detach())]
        torch.testing.assert_close(found, [whole.exp()[..., 1:], whole.exp().exp() * 2])
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            ExpInPlace.apply(make().requires_grad_())


class Raises(Function):
    """Ends in an error after it said that it changes its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        raise ValueError("as it wants")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_error_of_a_function_leaves_its_arguments_in_the_graph(P_x, whole):
    x = shard(P_x, whole).requires_grad_()
    y = x * 2
    with pytest.raises(ValueError, match="as it wants"):
        Raises.apply(y)
    assert y.requires_grad and not y.is_leaf
    y.sum().backward()
    assert x.grad.full_tensor().eq(2).all()


class Gathered(Function):
    """Its result is plain: nothing links it to the blocks."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().full_tensor()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


@pytest.mark.parametrize("rows", [7, 1])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_gradient_that_ends_before_the_blocks_is_refused(P_x, whole, rows, is_leaf):
    x = shard(P_x, whole[:, :, :rows]).requires_grad_()
    weight = torch.ones((), dtype=whole.dtype, requires_grad=True)
    backwards = (
        lambda y: y.backward(),
        lambda y: y.backward(inputs=[x]),
        lambda y: torch.autograd.grad(y, [x], allow_unused=True),
        lambda y: torch.autograd.grad(y + x.sum(), [x, weight]),
        lambda y: torch.autograd.backward([y, x.sum()], inputs=[x]),
    )
    for backward in backwards:
        y = Gathered.apply(x if is_leaf else 2 * x)
        with pytest.raises(UnsupportedError, match="whose block would get no gradient"):
            backward(y.sum() * weight)
    assert x.grad is None
    (Gathered.apply(x).detach() * x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole[:, :, :rows].square())


def test_nothing_outlives_its_graph(P_x, whole):
    gc.collect()
    gc.disable()
    try:
        for goes_back in (True, False):
            x = shard(P_x, whole).requires_grad_()
            y = Round.apply(Sigmoid.apply(x))
            loss = y.sum()
            seen = [weakref.ref(each._local) for each in (x, y)]
            if goes_back:
                loss.backward()
            del x, y, loss
            assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()


def test_a_tensor_that_a_function_changed_does_not_refer_to_itself(P_x, whole):
    x = shard(P_x, whole).requires_grad_()
    y = ExpInPlace.apply(x * 1)
    seen = weakref.ref(y._local)
    del x, y
    gc.collect()
    assert seen() is None

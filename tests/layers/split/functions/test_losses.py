"""Losses of torch."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.layers.split.against_whole import check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE, ROWS = (2, 3, 5, 4), (2, 5, 4)


def between():
    return (torch.rand(SHAPE, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def classes(*shape, most=3):
    return partial(torch.randint, 0, most, shape)


def weights(*shape):
    return partial(torch.rand, shape, dtype=torch.float64)


def smoothed(x, y, w=None, reduction="mean"):
    return F.cross_entropy(x, y, w, reduction=reduction, label_smoothing=0.2)


# Forms beyond torch's samples.
FORMS = {
    "batchmean": (partial(F.kl_div, reduction="batchmean"), [SHAPE, between]),
    "reduce": (partial(F.mse_loss, reduce=False), [SHAPE, SHAPE]),
    "size_average": (partial(F.mse_loss, size_average=False), [SHAPE, SHAPE]),
    "weighted squares": (lambda x, y, w: F.mse_loss(x, y, weight=w), [SHAPE, SHAPE], [weights(*SHAPE)]),
    "a weighted sum": (
        lambda x, y, w: F.l1_loss(x, y, weight=w, reduction="sum"), [SHAPE, SHAPE], [weights(*SHAPE)]
    ),
    "weighted entropies": (F.binary_cross_entropy, [between, between], [weights(*SHAPE)]),
    "positive weights": (
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
        [SHAPE, between], [weights(*SHAPE), weights(3, 1, 1)],
    ),
    "a variance for all channels": (F.gaussian_nll_loss, [SHAPE, SHAPE], [weights(2, 1, 5, 4)]),
    "a variance for all": (lambda x, y: F.gaussian_nll_loss(x, y, 2.0), [SHAPE, SHAPE]),
    "probabilities": (smoothed, [SHAPE, between], [weights(3)]),
    "plain probabilities": (F.cross_entropy, [SHAPE], [between]),
    "a sum of probabilities": (partial(smoothed, reduction="sum"), [SHAPE, between]),
    "likelihoods": (F.nll_loss, [SHAPE], [classes(*ROWS), weights(3)]),
    "split labels": (lambda x: F.cross_entropy(x, x.detach().argmax(1)), [SHAPE]),
    "a class is ignored": (partial(F.nll_loss, ignore_index=0), [SHAPE], [classes(*ROWS)]),
    "one vector": (F.cross_entropy, [(5,)], [classes()]),
    "fewer rows than ranks": (F.cross_entropy, [(2, 3)], [classes(2)]),
    "empty blocks": (lambda x, y: F.nll_loss(x.log_softmax(1), y), [(4, 3, 2)], [classes(4, 2)]),
    "no rows": (partial(smoothed, reduction="sum"), [(0, 9, 2)], [classes(0, 2), weights(9)]),
    "no rows alone": (partial(smoothed, reduction="none"), [(0, 9, 2)], [classes(0, 2), weights(9)]),
    **{
        f"no class of {n} rows, {how}": (
            lambda x, y, how=how: F.cross_entropy(x, y, reduction=how), [(n, 0)], [torch.ones(n, 0).double()]
        )
        for n in (0, 3) for how in ("mean", "sum", "none")
    },
    "split weights": (lambda w, x, y: F.cross_entropy(x, y, w), [weights(3)], [(5, 3), classes(5)]),
    "split weights of a sum": (
        lambda w, x, y: F.nll_loss(x, y, w, reduction="sum"), [weights(3)], [(5, 3), classes(5)]
    ),
}  # fmt: skip
test_forms = pytest.mark.filterwarnings("ignore:size_average and reduce")(forms(FORMS))
test_samples_of_torch = samples_of("losses", 2)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("shape", [(4, 1), (70_000, 1)])
@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_torchs_warning_of_sizes_has_the_line_of_the_user_and_those_of_the_whole(P_world, shape, loss):
    x, y = torch.zeros(shape), torch.ones(2)
    words = f"Using a target size (torch.Size([2])) that is different to the input size ({x.size()})."
    split = cut_along(P_world, 0, x)
    for one in (split, split.redistribute()):
        with pytest.warns(UserWarning, match=re.escape(words)) as found:
            loss(one, y)
        assert [each.filename for each in found] == [__file__]


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_losses_of_operands_that_are_broadcast(P_world, loss, reduction):
    shapes = (5, 1), (5, 3), (1, 3)
    for one, other in ((a, b) for a in shapes for b in shapes if a != b):
        x, y, weight = numbers(*one), numbers(*other), torch.rand(one, dtype=torch.float64)
        check(P_world, lambda x, y: loss(x, y, reduction=reduction), [x, y])
        check(P_world, lambda x, y, w: loss(x, y, reduction=reduction, weight=w), [x], [y, weight])


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_indices(P_world, reduction, smoothing):
    x, target, weight = numbers(*SHAPE), torch.randint(0, 3, ROWS), torch.rand(3, dtype=torch.float64)
    target[:, 1] = 1
    loss = partial(F.cross_entropy, reduction=reduction, label_smoothing=smoothing)
    for others in ([target], [target, weight]):
        check(P_world, partial(loss, ignore_index=1), [x], others)
    target[0, 0, 0] = -100
    check(P_world, loss, [x], [target])


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_what_does_not_fit_is_an_error(P_world):
    x = cut_along(P_world, 2, numbers(*SHAPE))
    with pytest.raises(RuntimeError, match="spatial targets"):
        F.cross_entropy(x, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="target size"):
        F.binary_cross_entropy(x, torch.zeros(2, 1, 1, 1, dtype=torch.float64))


@pytest.mark.sizes(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_types(P_world, dtype):
    (x, y), eps = torch.randn(2, *SHAPE).to(dtype), torch.finfo(dtype).eps
    check(P_world, F.mse_loss, [x, y], gradients=False, atol=4 * eps)
    check(P_world, F.cross_entropy, [x], [torch.randint(0, 3, ROWS)], gradients=False, atol=8 * eps)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_split_classes_meet_in_the_forward_alone(P_world, loss):
    x = cut_along(P_world, 1, numbers(4, 5))
    counters, target = x.machine.segments.counters, torch.tensor([0, 4, 2, 2])
    for _ in range(3):
        value, before = loss(x, target), vars(counters).copy()
        value.backward()
        moved = {name for name, count in vars(counters).items() if count != before[name]}
        assert not moved

"""Losses of torch."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions

SHAPE = 2, 3, 5, 4
ROWS = 2, 5, 4


def numbers(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def between(shape=SHAPE):
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def classes(*shape, most=3):
    return torch.randint(0, most, shape)


def weights(*shape):
    return torch.rand(shape, dtype=torch.float64)


def smoothed(x, y, w=None, reduction="mean"):
    return F.cross_entropy(x, y, w, reduction=reduction, label_smoothing=0.2)


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "batchmean": lambda: (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [numbers(), between()]),
    "reduce": lambda: (lambda x, y: F.mse_loss(x, y, reduce=False), [numbers(), numbers()]),
    "size_average": lambda: (lambda x, y: F.mse_loss(x, y, size_average=False), [numbers(), numbers()]),
    "weighted squares": lambda: (
        lambda x, y, w: F.mse_loss(x, y, weight=w),
        [numbers(), numbers()],
        [weights(*SHAPE)],
    ),
    "a weighted sum": lambda: (
        lambda x, y, w: F.l1_loss(x, y, weight=w, reduction="sum"),
        [numbers(), numbers()],
        [weights(*SHAPE)],
    ),
    "weighted entropies": lambda: (F.binary_cross_entropy, [between(), between()], [weights(*SHAPE)]),
    "positive weights": lambda: (
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
        [numbers(), between()],
        [weights(*SHAPE), weights(3, 1, 1)],
    ),
    "a variance for all": lambda: (lambda x, y: F.gaussian_nll_loss(x, y, 2.0), [numbers(), numbers()]),
    "probabilities": lambda: (smoothed, [numbers(), between()], [weights(3)]),
    "plain probabilities": lambda: (F.cross_entropy, [numbers()], [between()]),
    "a sum of probabilities": lambda: (lambda x, y: smoothed(x, y, None, "sum"), [numbers(), between()]),
    "likelihoods": lambda: (F.nll_loss, [numbers()], [classes(*ROWS), weights(3)]),
    "split labels": lambda: (lambda x: F.cross_entropy(x, x.detach().argmax(1)), [numbers()]),
    "a class is ignored": lambda: (
        lambda x, y: F.nll_loss(x, y, ignore_index=0),
        [numbers()],
        [classes(*ROWS)],
    ),
    "one vector": lambda: (F.cross_entropy, [numbers((5,))], [classes()]),
    "fewer rows than ranks": lambda: (F.cross_entropy, [numbers((2, 3))], [classes(2)]),
    "empty blocks": lambda: (
        lambda x, y: F.nll_loss(x.log_softmax(1), y),
        [numbers((4, 3, 2))],
        [classes(4, 2)],
    ),
    "no rows": lambda: (
        lambda x, y, w: smoothed(x, y, w, "sum"),
        [numbers((0, 9, 2))],
        [classes(0, 2), weights(9)],
    ),
    "no rows alone": lambda: (
        lambda x, y, w: smoothed(x, y, w, "none"),
        [numbers((0, 9, 2))],
        [classes(0, 2), weights(9)],
    ),
    "split weights": lambda: (
        lambda w, x, y: F.cross_entropy(x, y, w),
        [weights(3)],
        [numbers((5, 3)), classes(5)],
    ),
    "split weights of a sum": lambda: (
        lambda w, x, y: F.nll_loss(x, y, w, reduction="sum"),
        [weights(3)],
        [numbers((5, 3)), classes(5)],
    ),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(2))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "totals.losses", part, 2)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("shape", [(4, 1), (70_000, 1)])
@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_torchs_warning_of_sizes_has_the_line_of_the_user_and_those_of_the_whole(P_world, shape, loss):
    x, y = torch.zeros(shape), torch.ones(2)
    words = re.escape(
        f"Using a target size (torch.Size([2])) that is different to the input size ({x.size()})."
    )
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    for one in (block(P_x, x), block(P_x, x).redistribute()):
        with pytest.warns(UserWarning, match=words) as found:
            loss(one, y)
        assert [each.filename for each in found] == [__file__]


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_losses_of_operands_that_are_broadcast(P_world, loss, reduction):
    shapes = (5, 1), (5, 3), (1, 3)
    for one, other in ((a, b) for a in shapes for b in shapes if a != b):
        x, y, weight = numbers(one), numbers(other), torch.rand(one, dtype=torch.float64)
        check(P_world, lambda x, y: loss(x, y, reduction=reduction), [x, y])
        check(P_world, lambda x, y, w: loss(x, y, reduction=reduction, weight=w), [x], [y, weight])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_indices(P_world, reduction, smoothing):
    target = torch.randint(0, 3, ROWS)
    target[:, 1] = 1
    target[0, 0, 0] = -100
    weight = torch.rand(3, dtype=torch.float64)

    def loss(x, y, w=None):
        return F.cross_entropy(x, y, w, ignore_index=1, reduction=reduction, label_smoothing=smoothing)

    valid = torch.where(target < 0, 1, target)
    check(P_world, loss, [numbers()], [valid])
    check(P_world, loss, [numbers()], [valid, weight])
    check(
        P_world,
        lambda x, y: F.cross_entropy(x, y, reduction=reduction, label_smoothing=smoothing),
        [numbers()],
        [target],
    )


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_what_does_not_fit_is_an_error(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = block(P_x, numbers())
    with pytest.raises(RuntimeError, match="spatial targets"):
        F.cross_entropy(x, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="target size"):
        F.binary_cross_entropy(x, torch.zeros(2, 1, 1, 1, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="ctc_loss"):
        F.ctc_loss(x, torch.zeros(2, 2), (1, 1), (1, 1))


@pytest.mark.mpi
@pytest.mark.sizes(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_types(P_world, dtype):
    x, y = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    check(P_world, F.mse_loss, [x, y], gradients=False, atol=4 * torch.finfo(dtype).eps)
    check(
        P_world,
        F.cross_entropy,
        [x],
        [torch.randint(0, 3, ROWS)],
        gradients=False,
        atol=8 * torch.finfo(dtype).eps,
    )


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_split_classes_meet_in_the_forward_alone(P_world, loss):
    x, target = numbers((4, 5)), torch.tensor([0, 4, 2, 2])
    x = block(P_world.create_cartesian_topology_partition((1, P_world.size)), x)
    counters = x.machine.segments.counters
    for _ in range(3):
        value, before = loss(x, target), vars(counters).copy()
        value.backward()
        moved = {name for name, count in vars(counters).items() if count != before[name]}
        assert not moved

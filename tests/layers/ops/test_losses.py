"""Parts of losses add up to those of whole tensors: all ranks in one process."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Partition
from distdl_rma.geometry import Decomposition
from distdl_rma.layers.ops.losses import class_terms, divisor_of, divisor_of_classes

CLASSES, ROWS, RANKS = 5, 4, (0, 1, 2)


def test_divisors_of_parts_add_up_to_that_of_the_whole():
    whole, parts = (7, 6), [(3, 6), (0, 6), (4, 6)]
    for reduction in ("mean", "batchmean"):
        assert sum(divisor_of(reduction, part) for part in parts) == divisor_of(reduction, whole)
    assert divisor_of("mean", ()) == divisor_of("batchmean", ()) == divisor_of("sum", whole) == 1


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, math.inf, 2.0])])
def test_ignored_targets_are_not_counted(weight):
    target = torch.tensor([[0, 2, 1], [1, 2, 1]])
    assert divisor_of_classes(target, weight, 1) == (3 if weight is None else 4.5)


def contributions(function, x, target, weight, given):
    """Terms of each rank's classes, of which the last rank but one has none, and gradients of the scores."""
    found, numbers, cuts = [], [], (0, 2, 2, CLASSES)
    for turn in range(2):
        for me in RANKS:
            partition = Partition(RANKS, (1, len(RANKS)), me)
            shapes = {rank: (ROWS, cuts[rank + 1] - cuts[rank]) for rank in RANKS}
            layout = Decomposition.from_local_shapes(partition, shapes)
            mine = slice(cuts[me], cuts[me + 1])
            part = x[:, mine].detach().requires_grad_()
            truth = target[:, mine] if target.is_floating_point() else target

            def gathered(own, turn=turn):
                # The ranks play one after the other: each first says its numbers.
                numbers.append(own.detach())
                return torch.cat(numbers[: len(RANKS)] if turn else [own] * len(RANKS), 1)

            terms = class_terms(function, part, truth, weight, layout, 1, gathered, given)
            if turn:
                terms.sum().backward()
                found.append((terms.detach(), part.grad))
    terms, gradients = zip(*found, strict=True)
    return sum(terms), torch.cat(gradients, 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "smoothed indices", "probabilities", "log likelihoods"])
def test_terms_of_cut_classes_add_up_to_torchs(kind, weighted):
    function = F.nll_loss if kind == "log likelihoods" else F.cross_entropy
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 1, 2])
    if kind == "probabilities":
        target = torch.rand(ROWS, CLASSES, dtype=torch.float64)
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    given = {"ignore_index": -100 if kind == "probabilities" else 1}
    given |= {"label_smoothing": 0.2} if kind == "smoothed indices" else {}
    expected = function(x, target, weight=weight, reduction="none", **given)
    expected.sum().backward()
    terms, gradient = contributions(function, x, target, weight, given)
    torch.testing.assert_close(terms, expected.detach())
    torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("function", [F.nll_loss, F.cross_entropy])
def test_a_target_that_is_no_class_raises_torchs_error_once_all_have_gathered(function):
    for wrong, text in ((CLASSES, "Target 5 is out of bounds"), (-1, "Target -1 is out of bounds")):
        with pytest.raises(IndexError, match=text):
            contributions(
                function, torch.zeros(ROWS, CLASSES), torch.full((ROWS,), wrong), None, {"ignore_index": 1}
            )

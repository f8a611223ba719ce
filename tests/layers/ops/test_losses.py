"""Divisors of parts of losses add up to those of whole tensors; random losses show that their terms do."""

import math

import pytest
import torch

from distdl_rma.layers.ops.losses import divisor_of, divisor_of_classes


def test_divisors_of_parts_add_up_to_that_of_the_whole():
    whole, parts = (7, 6), [(3, 6), (0, 6), (4, 6)]
    for reduction in ("mean", "batchmean"):
        assert sum(divisor_of(reduction, part) for part in parts) == divisor_of(reduction, whole)
    assert divisor_of("mean", ()) == divisor_of("batchmean", ()) == divisor_of("sum", whole) == 1


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, math.inf, 2.0])])
def test_ignored_targets_are_not_counted(weight):
    target = torch.tensor([[0, 2, 1], [1, 2, 1]])
    assert divisor_of_classes(target, weight, 1) == (3 if weight is None else 4.5)

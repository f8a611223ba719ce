"""Losses over classes, which P_x may cut: each rank then computes the terms of its own classes.

Scores of 2 rows and 4 classes on a grid (1, 2), and their targets, which both ranks must pass alike::

                rank 0         rank 1         target
    row 0    x00   x01  |   x02   x03        3: of rank 1
    row 1    x10   x11  |   x12   x13        0: of rank 0

Cross entropy needs the sum of exponentials of whole rows: the ranks gather two numbers for each row. They
must know that their shards form a grid before this movement, and so agree on the shapes of each call.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ProtocolError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import as_words, sum_dtype
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import movement_between
from distdl_rma.layers.ops.losses import class_terms, divisor_of_classes
from distdl_rma.layers.partitioned.core.agreement import ShapeAgreement
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, common_dtype, source_of
from distdl_rma.layers.partitioned.core.refusals import attributed
from distdl_rma.layers.partitioned.loss.base import DistributedLoss
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.reduction_axes import parts_and_all


class _CutClasses:
    # Layout of scores whose classes are cut, and the all-gather among ranks that share rows. A plan of the
    # agreement: it is kept for its shapes, with the memory of the movement.
    def __init__(self, site: CallSite, scores: Decomposition, dim: int, dtype: torch.dtype) -> None:
        self.scores = lay.normal(scores)
        ends = parts_and_all(self.scores, (dim,), 2)
        self.gathered = movement_between(site, *ends, sum_dtype(dtype), "sums over classes").move

    def void(self) -> None:
        """Does nothing: no exchange starts before all ranks have agreed."""


class _ClassLoss(DistributedLoss):
    # A loss whose input has a dimension of classes.
    _unlike = (
        "have different classes of the same elements, and must have the same class indices, but they differ"
    )
    weight: torch.Tensor | None

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        if not P_x.dim:
            raise PartitionError(f"{type(self).__name__}: P_x has no dimension for the classes")
        # Dimension of the classes: 1, or 0 if it is the only one.
        self._dim = min(1, P_x.dim - 1)
        self._cuts_classes = P_x.shape[self._dim] > 1
        super().__init__(P_x, *arguments, **options)

    @cached_property
    def agreement(self) -> ShapeAgreement[_CutClasses] | None:
        """Agreement of the ranks on their tensors; None unless classes are cut."""
        return ShapeAgreement(self, self.P_x.ranks, inputs=2) if self._cuts_classes else None

    def partition_of(self, at: int, dims: int) -> Partition:
        """As in the base; class indices lack the dimension of the classes, and are replicated along it.

        So on a grid (2, 3) of rows and classes, indices are split over the two ranks of this rank's column.
        """
        P_x, dim = self.P_x, self._dim
        if not at or dims == P_x.dim or P_x.index is None:
            return P_x
        same = P_x.slab({dim: P_x.index[dim]})
        return same.create_cartesian_topology_partition(same.shape[:dim] + same.shape[dim + 1 :])

    def plan(self, facts: dict[int, InputFacts]) -> _CutClasses:
        """Layout of the scores, and the movement of sums over classes.

        Shapes of targets need no agreement: each rank has compared them with those of its scores.
        """
        with attributed("input"):
            source, dtype = source_of(self.P_x, facts)
            if dtype.is_complex:
                raise ShapeError(f"{dtype} has no order, which scores of classes need")
        with attributed("target"):
            common_dtype({rank: fact.of(1) for rank, fact in facts.items()})
        return _CutClasses(self.site, source, self._dim, dtype)

    def _agree(self, input: torch.Tensor, target: torch.Tensor, problem: str) -> None:
        # Begin and settle at once: there is little to compute before the gathering.
        if self.agreement is not None:
            self.agreement.begin(InputFacts.about((input, target), None, (), (False, False), problem))
            self.agreement.settle()

    def _sums_of(self, input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        # The backward of torch's kernel needs contiguous scores.
        x, given, dim = input.contiguous(), self.arguments, self._dim
        if self.agreement is None:
            terms, classes = super()._sums_of(x, target)[0], x.shape[dim]
        elif (plan := self.agreement.last) is None:
            raise ProtocolError(f"{self.name!r}: the ranks have not agreed on the scores")
        else:
            whole, classes = plan.scores, plan.scores.shape[dim]
            each = class_terms(type(self)._function, x, target, self.weight, whole, dim, plan.gathered, given)
            terms = each.sum()
        if target.is_floating_point():
            return terms, prod(n for d, n in enumerate(x.shape) if d != dim) if classes else 0
        return terms, float(divisor_of_classes(target, self.weight, given["ignore_index"]))

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # Uncut classes: torch on each rank takes 4 classes here and 5 there, which is a mistake.
        alike = super()._alike(input, target)
        return alike if self._cuts_classes else f"{alike} for {input.shape[self._dim]} classes"

    def _group(self, rank: int) -> tuple[int, ...]:
        # Ranks that share rows.
        if not self._cuts_classes:
            return ()
        index = dict(enumerate(self.P_x.index_of(rank)))
        del index[self._dim]
        return self.P_x.slab(index).ranks

    def _number(self, input: torch.Tensor, target: torch.Tensor) -> int:
        # A digest of class indices; 0 for probabilities, which need not be equal: each rank has those of its
        # classes. Ranks with other indices would add up terms of different targets, to a plausible number.
        compared = self._cuts_classes and not target.is_floating_point()
        return int.from_bytes(blake2b(as_words(target).tobytes(), digest_size=5).digest()) if compared else 0

    def _misfit(self, input: torch.Tensor, target: torch.Tensor) -> str:
        expected = input.shape[: self._dim] + input.shape[self._dim + 1 :]
        if target.is_floating_point():
            return super()._misfit(input, target)
        if target.shape == expected:
            return ""
        return (
            f"input has shape {tuple(input.shape)} but target {tuple(target.shape)}; class indices have shape"
            f" {tuple(expected)}"
        )

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return weight  # every rank has the weights of all classes

    def _check_reduction(self, reduction: str) -> None:
        super()._check_reduction(reduction)
        if reduction == "none" and self._cuts_classes:
            raise UnsupportedError(f"{type(self).__name__}: reduction='none' with classes split by P_x")

    def _check_weight(self, what: str, weight: Any, P_x: Partition) -> None:
        super()._check_weight(what, weight, P_x)
        if weight.dim() != 1:
            raise ShapeError(f"{what} has one number per class, got shape {tuple(weight.shape)}")

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)


class DistributedCrossEntropyLoss(_ClassLoss, nn.CrossEntropyLoss):
    """Cross entropy of logits: ``torch.nn.CrossEntropyLoss`` of the global tensors.

    The local input is (batch, classes, ...), or (classes,). The local target has either class indices, as
    integers of shape (batch, ...); or class probabilities, in the shape and dtype of the local input. Value
    and gradients are as for :class:`DistributedL1Loss`. A mean divides by the sum of the weights of all
    targets that are not ignored, on all ranks, and is NaN if there are none.

    If P_x splits the classes, ranks with the same elements but other classes must pass the same class
    indices, which is checked. They exchange two numbers per row, and each computes the terms of its classes.
    Shards must then form a grid.

    Parameters
    ----------
    weight
        As in torch: one number for each global class, in the dtype of the input; equal on all ranks.
    ignore_index, label_smoothing
        As in torch.

    Raises
    ------
    ShapeError
        In a call, on every rank of P_x with the same text: if on one of them the shapes or dtypes of input,
        target and weight do not fit each other, or an index is out of range; if two ranks differ in dtype, in
        the number of classes, or in the kind of target; if ranks with the same elements differ in their class
        indices.
    UnsupportedError
        If P_x splits the classes: at construction with ``reduction="none"``, and in a backward for second
        derivatives of cross entropy.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/losses.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> loss = DistributedCrossEntropyLoss(P_x)
    >>> scores, classes = torch.rand(1, 5, 4, 8), torch.randint(5, (1, 4, 8))  # of this rank's four rows
    >>> loss(scores, classes).shape  # the mean over the rows of all ranks
    torch.Size([])
    """

    _function = staticmethod(F.cross_entropy)


class DistributedNLLLoss(_ClassLoss, nn.NLLLoss):
    """Negative log likelihood of log-probabilities: ``torch.nn.NLLLoss`` of the global tensors.

    As :class:`DistributedCrossEntropyLoss`, but takes class indices only.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> loss = DistributedNLLLoss(P_x)
    >>> scores, classes = torch.rand(1, 5, 4, 8), torch.randint(5, (1, 4, 8))  # of this rank's four rows
    >>> loss(scores.log_softmax(1), classes).shape  # the mean over the rows of all ranks
    torch.Size([])
    """

    _function = staticmethod(F.nll_loss)

"""Losses over classes, which P_x may cut: each rank then computes the terms of its own classes.

Scores of 2 rows and 4 classes on a grid (1, 2), and their targets, which both ranks must pass alike::

                rank 0         rank 1         target
    row 0    x00   x01  |   x02   x03        3: of rank 1
    row 1    x10   x11  |   x12   x13        0: of rank 0

Ranks with other targets would add up terms of different rows, to a plausible number. So where classes are cut
the ranks compare a digest of their targets in each call, and with it whether each is a class: no rank knows
how many there are before the shapes are agreed on.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition, alike, by_key
from distdl_rma.layers.dtypes import as_words
from distdl_rma.layers.ops.losses import has_indices
from distdl_rma.layers.partitioned.core.refusals import attributed, refusal
from distdl_rma.layers.partitioned.loss.base import DistributedLoss, Parts
from distdl_rma.layers.split import layout as lay
from distdl_rma.segments.consensus import gather_words


class _ClassLoss(DistributedLoss):
    # A loss whose input has a dimension of classes.
    ignore_index: int

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        if not P_x.dim:
            raise PartitionError(f"{type(self).__name__}: P_x has no dimension for the classes")
        # Dimension of the classes: 1, or 0 if it is the only one.
        self._dim = min(1, P_x.dim - 1)
        self._cuts_classes = P_x.shape[self._dim] > 1
        super().__init__(P_x, *arguments, **options)

    def partition_of(self, at: int, dims: int) -> Partition:
        """As in the base; class indices lack the dimension of the classes, and are replicated along it.

        So on a grid (2, 3) of rows and classes, indices are split over the two ranks of this rank's column.
        """
        P_x, dim = self.P_x, self._dim
        if not at or dims == P_x.dim or P_x.index is None:
            return P_x
        same = P_x.slab({dim: P_x.index[dim]})
        return same.create_cartesian_topology_partition(same.shape[:dim] + same.shape[dim + 1 :])

    def _has_indices(self, dtype: torch.dtype) -> bool:
        return has_indices(type(self)._function, dtype.is_floating_point)

    def _target_shape(self, input: torch.Tensor, target: torch.Tensor) -> tuple[int, ...]:
        shape, dim = tuple(input.shape), self._dim
        return shape[:dim] + shape[dim + 1 :] if self._has_indices(target.dtype) else shape

    def _layouts(self, scores: Decomposition, target: torch.dtype) -> tuple[Decomposition, Decomposition]:
        if not self._has_indices(target):
            return scores, scores
        rows = [d for d in range(len(scores.shape)) if d != self._dim]
        return scores, lay.reordered(lay.whole(scores, (self._dim,)), rows)

    def _value_problem(self, input: torch.Tensor, target: torch.Tensor) -> str:
        return "" if self._cuts_classes else self._beyond(input.shape[self._dim], target)

    def _beyond(self, classes: int, target: torch.Tensor) -> str:
        # The usual target is one pass over its elements; only one with ignored elements is looked at closely.
        if target.is_floating_point() or target.is_complex() or not target.numel():
            return ""
        low, high = target.aminmax()
        if low >= 0 and high < classes:
            return ""
        beyond = target[(target != self.ignore_index) & ((target < 0) | (target >= classes))]
        return f"Target {int(beyond[0])} is out of bounds of {classes} classes" if beyond.numel() else ""

    def _loss_of(self, parts: Parts, *xs: torch.Tensor) -> torch.Tensor:
        scores, target = xs
        if self._cuts_classes and self._has_indices(target.dtype):
            self._compare(parts.layouts[0].shape[self._dim], target)
        # The backward of torch's kernel needs contiguous scores.
        return super()._loss_of(parts, scores.contiguous(), target)

    def _compare(self, classes: int, target: torch.Tensor) -> None:
        code = blake2b(as_words(target.cpu().contiguous()).tobytes(), digest_size=16).hexdigest()
        mine, title = [self._beyond(classes, target), code], f"{self.name} (targets)"
        found = gather_words(self.machine.segments, mine, title, self.P_x.ranks)
        problems = {rank: problem for rank, (problem, _) in found.items()}
        if any(problems.values()):
            raise refusal(self.name, problems)
        place, dim = self.P_x.index_of, self._dim
        for ranks in by_key(found, lambda rank: (place(rank)[:dim], place(rank)[dim + 1 :])).values():
            with attributed(f"{self.name!r}"):
                alike(
                    {rank: found[rank][1] for rank in ranks},
                    "ranks {0} and {2} have different classes of the same elements, and must have the same"
                    " class indices, but they differ",
                )

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
        In a backward for second derivatives of cross entropy, if P_x splits the classes.

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
